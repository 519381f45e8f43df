"""A fork while other OS threads tokenize blocks neither process, and the parent's runtime refuses to tokenize there."""

from __future__ import annotations

import os
import subprocess
import sys

from support.paths import ROOT

PROGRAM = """
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


def test_a_forked_process_tokenizes_with_a_runtime_of_its_own() -> None:
    paths = os.pathsep.join((str(ROOT / "src"), str(ROOT / "tests")))
    environment = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=environment | {"PYTHONPATH": paths},
    )
    assert done.stdout == f"{[0] * 8}\n", done.stderr
