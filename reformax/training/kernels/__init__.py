"""Kernels of training for NVIDIA GPUs."""
