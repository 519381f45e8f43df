"""Benchmarks of a bundle beside other runtimes: `python -m benchmarks` in a checkout."""
