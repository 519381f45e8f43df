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

TOKENIZING = """
import os, sys, threading, warnings
warnings.simplefilter("ignore")
from spaceport.runtime import RuntimeClosed
from support.hash_engine import Language
from support.hash_runtime import hash_runtime

TEXT = "abcabcad" * 2000  # long enough for the tokenizer's own OS threads
runtime = hash_runtime(Language(3))
stop = threading.Event()

def tokenize():
    while not stop.is_set():
        runtime.tokens_of(TEXT)

threads = [threading.Thread(target=tokenize) for _ in range(3)]
for thread in threads:
    thread.start()
expected = runtime.tokens_of(TEXT)
codes = []
for _ in range(8):
    if (child := os.fork()) == 0:
        try:
            runtime.tokens_of(TEXT)
        except RuntimeClosed:
            own = hash_runtime(Language(3))
            os._exit(0 if own.tokens_of(TEXT) == expected else 2)
        os._exit(3)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
stop.set()
for thread in threads:
    thread.join()
print(codes)
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


def test_a_forked_process_tokenizes_with_a_runtime_of_its_own() -> None:
    assert run(TOKENIZING)[0] == f"{[0] * 8}\n"
