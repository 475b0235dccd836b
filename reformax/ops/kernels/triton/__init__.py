"""Pallas kernels for NVIDIA GPUs, compiled by Triton."""
