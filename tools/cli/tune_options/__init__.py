"""Tune options: the options of `spaceport tune`, by what they are about."""
