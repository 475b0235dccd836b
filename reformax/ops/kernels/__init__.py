"""Kernels for NVIDIA GPUs, each imported by the algorithm that owns it when `impl` chooses it."""
