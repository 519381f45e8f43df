"""Peers: which are chosen, their processes, and what happens if one fails."""

from __future__ import annotations

import sys
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
from support.fake_subjects import FAKE
from support.paths import TINY

MACHINE = Machine("a CPU", "model 1", 2, (), "a system")


def quiet(_: str) -> None:
    pass


@contextmanager
def running(folder: Path, *peers: Peer) -> Iterator[Peers]:
    """Fake peers in an environment that looks installed."""
    work = Environments(folder)
    if not work.python("ctranslate2").exists():
        work.python("ctranslate2").parent.mkdir(parents=True)
        work.python("ctranslate2").symlink_to(Path(sys.executable))
        work.record_installed("ctranslate2")
    with running_peers(PeerOptions(peers, folder, TINY, None, None, False), MACHINE, [99], (64, 6), 1, quiet) as found:
        yield found


def fake(name: str = "fake", **options: object) -> Peer:
    return Peer(name, "ctranslate2", str(FAKE), (), "none", {"step": 2.0, **options})


def test_a_peer_answers_with_and_without_lookup_in_one_process(tmp_path: Path) -> None:
    with running(tmp_path, fake()) as peers:
        plain, lookup = peers.subjects
        assert plain.worker is lookup.worker
        assert [worker.process.poll() for worker in peers.workers] == [None]
        found = plain.answer([5, 6, 7])
        assert (found.tokens, found.seconds, found.first_token_seconds, found.first_tokens) == (4, 8.0, 2.0, 1)
        assert found.complete
        assert found.statistics is None
        assert lookup.answer([5, 6, 7]).seconds == 5.0
        (opened,) = peers.opened
        assert (opened.name, opened.model, opened.versions) == ("fake", TINY.name, {})
    assert plain.worker.process.poll() is not None


def test_a_peer_that_cannot_run_is_skipped_with_the_reason(tmp_path: Path) -> None:
    missing = Peer("other", "openvino-genai", str(FAKE), (), "none", {})
    narrow = fake("narrow", dtype="bfloat16")
    with running(tmp_path, fake(fails="open"), missing, narrow) as peers:
        assert peers.subjects == []
        reasons = {skipped.name: skipped.reason for skipped in peers.skipped}
    assert "no model today" in reasons["fake"]
    assert reasons["other"].endswith("add --setup")
    assert reasons["narrow"] == "this CPU has none of avx512_bf16, amx_bf16: measure float32"


def test_a_process_that_ends_is_a_failure_of_its_subjects(tmp_path: Path) -> None:
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


def test_a_peer_without_its_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionFault, match=r"--peers names 'llama\.cpp': expected --gguf FILE"):
        chosen_peers("llama.cpp", TINY, None)
    with pytest.raises(OptionFault, match="--peers names 'transformers float32': expected --checkpoint FOLDER"):
        chosen_peers("transformers", None, None)
    with pytest.raises(OptionFault, match="--peers names 'vllm'"):
        chosen_peers("vllm", TINY, None)
    with pytest.raises(InputFault, match=r"--checkpoint .*: expected a Hugging Face checkpoint folder"):
        chosen_peers(None, tmp_path, None)
    with pytest.raises(InputFault, match=r"--gguf .*none.gguf: expected a GGUF file"):
        chosen_peers(None, None, tmp_path / "none.gguf")
