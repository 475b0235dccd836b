"""Code that the benchmarks share. A benchmark imports this and peers, but no other benchmark."""
