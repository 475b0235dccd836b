"""Several simulated devices, in another process."""
