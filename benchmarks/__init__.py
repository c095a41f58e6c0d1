"""Measure what the documentation reports: `python -m benchmarks [PART ...]` and `python -m benchmarks.rivals`."""
