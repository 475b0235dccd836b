"""What the benchmarks share. A benchmark imports this, rows and peers, but no other benchmark."""
