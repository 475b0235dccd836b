"""reformax: efficient transformers for JAX and Trax.

`reformax.ops` holds the attention algorithms as pure functions, `reformax.layers` wraps them as
Trax layers, `reformax.models` assembles the layers. Importing `reformax` itself loads nothing.
"""

__version__ = "0.1.0"
