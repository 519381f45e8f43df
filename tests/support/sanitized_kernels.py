"""Runs the tests of the kernels, and damaged bundles that use them, with AddressSanitizer and UndefinedBehaviorSanitizer.

    PYTHONPATH=tests python -m support.sanitized_kernels

Arguments go to pytest. Needs GCC and its sanitizer libraries; compiling takes three minutes, the first time.
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


def main() -> int:
    flags = [*FLAGS, *emulation()]
    folder = built(
        "sanitized-kernels",
        [*sources(), flags],
        ["kernels/build.py"],
        lambda to: build(to / library_name(), ["g++"], flags=flags, test_encoding=True),
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
    # The digests come from a program without sanitizers, and the libraries that sanitizers need are more than one.
    tests = [str(TESTS / "kernels"), str(TESTS / "attack" / "test_damaged_bundles.py")]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *tests, *sys.argv[1:]]
    for left_out in ("test_instruction_sets.py", "test_build.py"):
        command += ["--ignore", str(TESTS / "kernels" / left_out)]
    return subprocess.run(command, env=os.environ | settings, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
