"""Kernels for NVIDIA GPUs, each beside the layer whose function it computes."""
