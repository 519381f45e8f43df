"""Exit codes: the exit status of every command."""

OK = 0
FAULT = 1  # a bug in Spaceport, or an error of the operating system
USAGE = 2  # invalid options
INPUT = 3  # invalid files or requests
ACCURACY = 4  # outputs differ by more than the tolerance
MISSING = 5  # a missing package, library or device
INTERRUPTED = 130
