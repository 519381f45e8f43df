"""The command line as a module: `python -m spaceport`."""

from spaceport.tools.cli import main

main()
