"""Several simulated devices, in a process of their own."""
