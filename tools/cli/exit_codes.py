"""Exit codes: what the exit status of a command says."""

OK = 0
FAULT = 1  # a fault of Spaceport itself, or an error of the operating system
USAGE = 2  # invalid options
INPUT = 3  # invalid files or requests
ACCURACY = 4  # outputs differ by more than the tolerance
MISSING = 5  # a missing package, library or device
INTERRUPTED = 130
