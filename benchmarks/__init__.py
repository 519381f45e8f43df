"""Benchmarks of the project itself: `python -m benchmarks` in a checkout; `spaceport bench` has those for users."""
