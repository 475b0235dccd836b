"""Sources of tokens: one file each, with a factory of the same name.

A factory returns a `reformax.task.Task` and reads the data once. NumPy alone makes the
batches; neither TensorFlow nor JAX is imported.
"""
