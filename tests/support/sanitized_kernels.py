"""Runs the tests of the kernels, and damaged bundles that use them, with AddressSanitizer and UndefinedBehaviorSanitizer.

    PYTHONPATH=tests python -m support.sanitized_kernels
    PYTHONPATH=tests python -m support.sanitized_kernels damaged 0 200000

The second runs damaged operators only, from a first number on; other arguments go to pytest. Needs GCC and its sanitizer
libraries; compiling takes three minutes, the first time.
"""

import os
import subprocess
import sys

from spaceport.kernels.build import build, library_name
from support.cache import built
from support.native_operators import emulation, sources
from support.paths import TESTS

# A finding ends the process.
FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g", "-O1")


def _tests(*arguments: str) -> list[str]:
    """A module with its arguments."""
    if arguments[:1] == ("damaged",):
        return ["support.damaged_inputs", *arguments[1:]]
    # The digests come from a program without sanitizers, and the libraries that sanitizers need are more than one.
    left_out = [str(TESTS / "kernels" / name) for name in ("test_instruction_sets.py", "test_build.py")]
    tests = [str(TESTS / "kernels"), str(TESTS / "attack" / "test_damaged_bundles.py")]
    return ["pytest", "-p", "no:cacheprovider", *tests, *arguments, *(f"--ignore={each}" for each in left_out)]


def main() -> int:
    flags = [*FLAGS, *emulation()]
    folder = built(
        "sanitized-kernels",
        [*sources(), flags],
        lambda to: build(to / library_name(), ["g++"], flags=flags, test_encoding=True),
        ["kernels/build.py"],
    )
    runtimes = [
        subprocess.run(
            ["g++", f"-print-file-name={name}.so"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan", "libubsan")
    ]
    settings = {
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0",  # of Python, at its end
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",  # so that reads beyond an array of numpy are seen
        "TESTED_KERNELS": str(folder / library_name()),
    }
    command = [sys.executable, "-m", *_tests(*sys.argv[1:])]
    return subprocess.run(command, env=os.environ | settings, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
