"""Linear recurrences in chunks, and the features and convolutions of their inputs."""
