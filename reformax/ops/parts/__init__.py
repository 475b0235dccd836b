"""The parts of the algorithms in `reformax.ops`: hashing, sorting, chunks, tiles, caches."""
