"""Adopt: published weights that draft for themselves, for `spaceport export`."""
