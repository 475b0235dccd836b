"""Kernels, a folder for each backend. An algorithm imports its own when `impl` chooses them."""
