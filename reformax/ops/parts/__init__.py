"""What the algorithms of `reformax.ops` are built of: hashing, sorting, chunks, tiles, caches."""
