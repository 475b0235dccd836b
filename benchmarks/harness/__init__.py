"""Code that the benchmarks share. A benchmark imports this and peers, but no other benchmark.

`timing`, `failures` and `processes` need no framework: PyTorch's processes import them too.
"""
