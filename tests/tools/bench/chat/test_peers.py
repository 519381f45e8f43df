"""Peers: which are chosen, their processes, and what happens if one fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from spaceport.graphs.contract.faults import InputFault, OptionFault
from spaceport.tools.bench.chat.options import PeerOptions
from spaceport.tools.bench.chat.peers import PEERS, Peers, chosen_peers, running_peers
from spaceport.tools.bench.compare.machine import Machine
from spaceport.tools.bench.compare.subjects import Peer
from spaceport.tools.bench.compare.work_folder import Environments
from spaceport.tools.bench.compare.worker_process import WorkerFailed
from support.fake_subjects import FAKE, installed
from support.paths import TINY

pytestmark = pytest.mark.on_change("tests/support/fake_runtime.py")  # starts processes
MACHINE = Machine("a CPU", "model 1", 2, (), "a system")


@contextmanager
def running(folder: Path, *peers: Peer) -> Iterator[Peers]:
    """Fake peers in an environment that looks installed."""
    installed(Environments(folder), "ctranslate2")
    options = PeerOptions(peers, folder, TINY, None, None, False)
    with running_peers(options, MACHINE, [99], (64, 6), 1, lambda _: None) as found:
        yield found


def fake(name: str = "fake", **options: object) -> Peer:
    return Peer(name, "ctranslate2", str(FAKE), (), "none", {"step": 2.0, **options})


def test_a_peer_answers_with_and_without_lookup_in_one_process(tmp_path: Path) -> None:
    with running(tmp_path, fake()) as peers:
        plain, lookup = peers.subjects
        assert plain.worker is lookup.worker
        found = plain.answer([5, 6, 7])
        assert (found.tokens, found.seconds, found.first_token_seconds, found.first_tokens) == (4, 8.0, 2.0, 1)
        assert (found.complete, found.statistics) == (True, None)
        assert lookup.answer([5, 6, 7]).seconds == 5.0
        (opened,) = peers.opened
        assert (opened.name, opened.model, opened.versions) == ("fake", TINY.name, {})
    assert plain.worker.process.poll() is not None


def test_a_peer_that_cannot_run_is_skipped_with_the_reason_and_one_that_ends_has_failed(tmp_path: Path) -> None:
    missing = Peer("other", "openvino-genai", str(FAKE), (), "none", {})
    narrow = fake("narrow", dtype="bfloat16")
    with running(tmp_path, fake(fails="open"), missing, narrow) as peers:
        assert peers.subjects == []
        reasons = {skipped.name: skipped.reason for skipped in peers.skipped}
    assert "no model today" in reasons["fake"]
    assert reasons["other"].endswith("add --setup")
    assert reasons["narrow"] == "this CPU has none of avx512_bf16, amx_bf16: measure float32"
    with running(tmp_path, fake(fails="answer")) as peers, pytest.raises(WorkerFailed, match="no answer today"):
        peers.subjects[0].answer([5])


def test_the_models_that_are_given_choose_the_peers(tmp_path: Path) -> None:
    gguf = tmp_path / "model.Q4_1.gguf"
    gguf.write_bytes(b"GGUF")
    assert chosen_peers(None, None, None) == ()
    assert [peer.name for peer in chosen_peers(None, None, gguf)] == ["llama.cpp"]
    assert chosen_peers(None, TINY, gguf) == PEERS
    assert [peer.name for peer in chosen_peers("transformers bfloat16", TINY, None)] == ["transformers bfloat16"]
    assert len(chosen_peers("transformers", TINY, None)) == 2
    for fault, message, chosen in (
        (OptionFault, r"--peers names 'llama\.cpp': expected --gguf FILE", ("llama.cpp", TINY, None)),
        (OptionFault, "names 'transformers float32': expected --checkpoint FOLDER", ("transformers", None, None)),
        (OptionFault, "--peers names 'vllm'", ("vllm", TINY, None)),
        (InputFault, r"--checkpoint .*: expected a Hugging Face checkpoint folder", (None, tmp_path, None)),
        (InputFault, r"--gguf .*none.gguf: expected a GGUF file", (None, None, tmp_path / "none.gguf")),
    ):
        with pytest.raises(fault, match=message):
            chosen_peers(*chosen)
