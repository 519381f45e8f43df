"""Command line: the spaceport commands, one small file each."""
