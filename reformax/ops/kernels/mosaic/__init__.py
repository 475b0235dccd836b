"""Kernels for NVIDIA GPUs of the Hopper generation, in Pallas for Mosaic GPU."""
