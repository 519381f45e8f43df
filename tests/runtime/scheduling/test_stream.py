"""Text is made where it is read unless a stop string may end it: the same pieces, and errors stay with their text."""

from __future__ import annotations

import asyncio

import pytest

from spaceport.runtime.decode.draft import Source
from spaceport.runtime.decode.threads import Thread
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.scheduling.generation import Delivery
from spaceport.runtime.text.piece import Piece
from spaceport.runtime.text.transcript import Transcript
from support.hash_engine import Language
from support.hash_runtime import hash_runtime, slow_runtime

NEVER = "zz"  # no text of these networks holds it


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "options", [{}, {"draft": "chain"}, {"max_threads": 4}, {"mask_slots": 0, "logprobs": 2}], ids=str
)
def test_text_made_by_the_reader_has_the_pieces_of_text_made_by_the_worker(seed: int, options: dict[str, int]) -> None:
    found: list[list[Piece]] = []
    with hash_runtime(Language(seed), max_seq_len=100, max_slots=200) as runtime:
        for stop in ((), NEVER):
            with runtime.stream([1, 2, 3], Decoding(stop=stop, **options)) as stream:
                pieces = list(stream)
                assert "".join(piece.reading for piece in pieces) == stream.completion().text
            found.append(pieces)
    assert found[0] == found[1]


def test_text_that_cannot_be_made_fails_where_it_is_read_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def refuse(self: Transcript, thread: Thread, token: int, drafted: bool, source: Source | None) -> bool:
        tried.append(token)
        raise ValueError("no text")

    with hash_runtime(Language(1), max_seq_len=100) as runtime:
        with monkeypatch.context() as patch:
            patch.setattr(Transcript, "on_token", refuse)
            with pytest.raises(ValueError, match="no text"):
                runtime.generate([1, 2, 3])
            with pytest.raises(ValueError, match="no text"):
                asyncio.run(runtime.agenerate([1, 2, 3]))
            stream = runtime.stream([1, 2, 3])
            with pytest.raises(ValueError, match="no text"):
                next(stream)
            with pytest.raises(ValueError, match="no text"):
                stream._submission.submitted.completion()
        assert len(tried) == 3
        assert runtime.generate([1, 2, 3]).tokens


@pytest.mark.parametrize(("patient", "most"), [(True, 4), (False, 61)])
def test_a_reader_of_the_whole_text_is_not_woken_for_each_step(patient: bool, most: int) -> None:
    runtime, engine = slow_runtime(Language(1))
    with runtime:
        stream = runtime.stream([1, 2, 3], Decoding(max_tokens=60, mask_slots=0, lookup=0, fork=False))
        generation, woken = stream._submission.submitted, 0
        generation.patient = patient  # as `completion` sets it, before the first step is over
        engine.leave.set()
        read = generation.read

        def count(delivery: Delivery) -> list[Piece]:
            nonlocal woken
            woken += 1
            return read(delivery)

        generation.read = count  # type: ignore[method-assign]
        pieces = [*stream]
        found = stream.completion()
    assert "".join(piece.reading for piece in pieces) == found.text
    assert len(found.tokens) > 40
    assert (woken > 40) == (not patient)
    assert woken <= most
