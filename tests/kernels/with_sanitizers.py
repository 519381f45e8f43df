"""Runs the tests of the kernels with AddressSanitizer and UndefinedBehaviorSanitizer: python tests/kernels/with_sanitizers.py.

Arguments go to pytest. Needs GCC and its sanitizer libraries.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from spaceport.kernels.build import build, library_name

TESTS = Path(__file__).parent
# Not float-cast-overflow and alignment alone: everything; a finding ends the process.
FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g", "-O1")


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / library_name()
        build(library, ["g++"], flags=FLAGS, test_encoding=True)
        runtimes = [
            subprocess.run(["g++", f"-print-file-name={name}.so"], capture_output=True, text=True, check=True).stdout.strip()
            for name in ("libasan", "libubsan")
        ]
        settings = {
            "LD_PRELOAD": " ".join(runtimes),
            "ASAN_OPTIONS": "detect_leaks=0",  # of Python, at its end
            "UBSAN_OPTIONS": "print_stacktrace=1",
            "PYTHONMALLOC": "malloc",  # so that reads beyond an array of numpy are seen
            "TESTED_KERNELS": str(library),
        }
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(TESTS), *sys.argv[1:]]
        return subprocess.run(command, env=os.environ | settings, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
