"""Kernels for NVIDIA GPUs, a file for each layer that has some."""
