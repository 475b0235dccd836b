"""Where tokens come from: one file per source, each with a factory of the same name.

A factory returns a `reformax.data.base.Task`. The data are read once, when the factory is called;
from then on batches are made by NumPy alone, and neither TensorFlow nor JAX is imported.
"""
