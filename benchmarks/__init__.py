"""What the documentation reports is measured here: `python -m benchmarks`, or `python -m benchmarks PART`."""
