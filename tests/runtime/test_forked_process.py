"""A forked process gets an error from its parent's runtime at once, whatever the parent's threads were doing."""

from __future__ import annotations

import os
import subprocess
import sys

from support.paths import ROOT

LOCKED = """
import os, sys, warnings
warnings.simplefilter("ignore")
from spaceport.runtime import Decoding, RuntimeClosed
from support.hash_engine import Language
from support.hash_runtime import hash_runtime

runtime = hash_runtime(Language(3, end_every=10**9), max_seq_len=3000)
stream = runtime.stream([1, 2], Decoding(mask_slots=0))
next(stream)
locks = [runtime._worker._change, runtime._worker._scheduler.queue._lock, stream._reading]
for lock in locks:  # as another OS thread may hold them at the fork
    lock.acquire()
if os.fork() == 0:
    uses = [
        lambda: runtime.generate([1]), lambda: runtime.stream("ab"), lambda: runtime.score([1, 2]), runtime.status,
        lambda: next(stream), stream.completion,
    ]
    errors = 0
    for use in uses:
        try:
            use()
        except RuntimeClosed as error:
            errors += "forked from: open it here" in str(error)
    runtime.close()
    print(errors, "of", len(uses), flush=True)
    sys.exit(0)  # with everything that runs at exit
for lock in locks:
    lock.release()
print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
runtime.close()
"""


def run(program: str) -> tuple[str, str]:
    """What a program prints and reports."""
    environment = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT / "src"), str(ROOT / "tests")))
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)
    return done.stdout, done.stderr


def test_a_forked_process_gets_errors_instead_of_waiting_for_locks() -> None:
    assert run(LOCKED) == ("6 of 6\n0\n", "")
