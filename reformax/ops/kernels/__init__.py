"""Kernels for NVIDIA GPUs. An algorithm imports its own when `impl` chooses them."""
