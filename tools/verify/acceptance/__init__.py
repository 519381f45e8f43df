"""Acceptance: prediction accuracy of mask slots and tokens per step, of a checkpoint or a bundle."""
