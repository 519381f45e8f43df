"""Terminal: tables, progress and live output of the commands."""
