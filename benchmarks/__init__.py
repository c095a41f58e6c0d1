"""Scripts that print the tables of the documentation; each runs as `python -m benchmarks.NAME`."""
