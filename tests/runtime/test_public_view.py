"""What pieces, threads and completions say of one text agrees, whatever is asked for."""

from __future__ import annotations

import os
import warnings

from hypothesis import given, settings
from hypothesis import strategies as st

from spaceport.runtime.decoding import Decoding
from support.hash_engine import END, Language
from support.hash_runtime import hash_runtime


@settings(max_examples=80)
@given(
    seed=st.integers(0, 10**6),
    prompt=st.lists(st.integers(0, END - 1), min_size=1, max_size=5),
    fork_every=st.sampled_from((3, 5, 9)),
    decoding=st.builds(
        Decoding,
        max_tokens=st.integers(1, 30),
        max_total_tokens=st.none() | st.integers(1, 60),
        stop=st.lists(st.text("abcdefghij", min_size=1, max_size=3), max_size=4),
        mask_slots=st.none() | st.just(0),
        max_threads=st.sampled_from((1, 3, 16)),
        max_depth=st.integers(0, 3),
        logprobs=st.none() | st.just(1),
    ),
)
def test_pieces_threads_and_the_completion_have_the_same_text(
    seed: int, prompt: list[int], fork_every: int, decoding: Decoding
) -> None:
    language = Language(seed, 80, end_every=12, fork_every=fork_every)
    with hash_runtime(language, max_seq_len=100) as runtime, runtime.stream(prompt, decoding) as stream:
        pieces = list(stream)
        found = stream.completion()
    assert "".join(piece.reading for piece in pieces) == found.text
    for thread in found.threads:
        own = [piece.token for piece in pieces if piece.thread == thread.path and piece.token is not None]
        assert tuple(own[: len(thread.tokens)]) == thread.tokens
        assert thread.ending == "stop" or len(own) == len(thread.tokens)  # a stop string may cut what was shown
        assert len(thread.logprobs) == (0 if decoding.logprobs is None else len(thread.tokens))
    wide = {thread.ending for thread in found.threads} & {"total", "deadline", "cancelled"}
    assert found.ending == (wide.pop() if wide else found.threads[0].ending)
    assert found.statistics.tokens <= (decoding.max_total_tokens or 10**6)


def test_a_runtime_in_a_forked_process_says_so_and_does_not_hang() -> None:
    with hash_runtime(Language(1), max_seq_len=100) as runtime:
        assert runtime.generate([1, 2], Decoding(max_tokens=3)).tokens
        reader, writer = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons advise against it, rightly
            child = os.fork()
        if not child:
            try:
                runtime.generate([1, 2], Decoding(max_tokens=3))
            except RuntimeError as error:
                os.write(writer, str(error).encode())
            os._exit(0)
        os.close(writer)
        assert b"forked from: open it here" in os.read(reader, 1000)
        os.waitpid(child, 0)
        os.close(reader)
