"""Subjects: bundles are named after their weights, and a missing peer is skipped with advice."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from spaceport.graphs.contract.faults import InputFault, OptionFault
from spaceport.tools.bench.compare.pins import ENVIRONMENTS, UNWANTED
from spaceport.tools.bench.compare.subjects import (
    ADAPTERS,
    PEERS,
    Skipped,
    Subject,
    bundle_subjects,
    chosen,
    peer_subject,
)
from spaceport.tools.bench.compare.work_folder import WorkFolder, fingerprint
from support.paths import TINY

BY_NAME = {peer.name: peer for peer in PEERS}


def ready(work: WorkFolder, environment: str) -> None:
    """Create an empty environment that counts as installed."""
    work.python(environment).parent.mkdir(parents=True)
    work.record_installed(environment)


def test_every_peer_has_an_adapter_pins_and_a_unique_name() -> None:
    assert len(BY_NAME) == len(PEERS)
    for peer in PEERS:
        assert (ADAPTERS / peer.adapter).is_file()
        assert peer.environment in ENVIRONMENTS
    for name, requirements in ENVIRONMENTS.items():
        assert all(re.fullmatch(r"[\w.-]+(\[\w+\])?==[\w.]+", one) for one in requirements), name
    assert set(UNWANTED) <= set(ENVIRONMENTS)


def test_the_name_of_a_runtime_selects_all_its_formats() -> None:
    assert [peer.name for peer in chosen("openvino-genai")] == ["openvino-genai int8", "openvino-genai int4"]
    assert [peer.name for peer in chosen("ctranslate2, openvino-genai int4")] == [
        *("openvino-genai int4", "ctranslate2 int8")
    ]
    assert chosen("") == ()
    with pytest.raises(OptionFault, match="names 'vllm': expected any of ctranslate2, ctranslate2 int8"):
        chosen("vllm")


def test_bundles_are_named_after_their_weights(tiny_bundle: Path, half_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "again").symlink_to(tiny_bundle)
    found = bundle_subjects([tiny_bundle, half_bundle, tmp_path / "again"])
    assert [subject.name for subject in found] == [
        "spaceport float32",
        "spaceport float16",
        "spaceport float32 (again)",
    ]
    assert all(subject.is_bundle and subject.python == Path(sys.executable) for subject in found)
    with pytest.raises(OptionFault, match="given twice"):
        bundle_subjects([tiny_bundle, tmp_path / "again", tmp_path / "again"])


def test_a_peer_is_skipped_until_its_environment_and_model_exist(tmp_path: Path) -> None:
    work, peer = WorkFolder(tmp_path, TINY), BY_NAME["ctranslate2 int8"]
    missing = peer_subject(peer, work, None)
    assert isinstance(missing, Skipped)
    assert f"at {tmp_path}/environments/ctranslate2: add --setup" in missing.reason
    ready(work, peer.environment)
    missing = peer_subject(peer, work, None)
    assert isinstance(missing, Skipped)
    assert f"no converted model at {work.models}/ctranslate2-int8: add --setup" in missing.reason
    work.model("ctranslate2-int8").mkdir(parents=True)
    found = peer_subject(peer, work, None)
    assert isinstance(found, Subject)
    assert (found.name, found.options, found.is_bundle) == ("ctranslate2 int8", {"compute_type": "int8"}, False)


def test_an_environment_with_other_pins_is_not_used(tmp_path: Path) -> None:
    work = WorkFolder(tmp_path, TINY)
    ready(work, "ctranslate2")
    assert work.installed("ctranslate2")
    (record,) = work.environment("ctranslate2").glob("*.json")
    record.write_text(json.dumps(["ctranslate2==1.0"]), "utf-8")
    assert not work.installed("ctranslate2")


def test_onnxruntime_genai_has_a_second_model_for_steps_of_several_rows(tmp_path: Path) -> None:
    work, peer = WorkFolder(tmp_path, TINY), BY_NAME["onnxruntime-genai int4"]
    ready(work, peer.environment)
    work.model("genai-int4-pruned").mkdir(parents=True)
    missing = peer_subject(peer, work, None)
    assert isinstance(missing, Skipped)
    assert missing.reason.endswith("genai-int4: add --setup")
    work.model("genai-int4").mkdir()
    found = peer_subject(peer, work, None)
    assert isinstance(found, Subject)
    assert (found.model.name, found.options) == ("genai-int4-pruned", {"rows_model": str(work.model("genai-int4"))})


def test_llama_cpp_needs_a_gguf_file_and_is_named_after_its_format(tmp_path: Path) -> None:
    work, peer = WorkFolder(tmp_path, TINY), BY_NAME["llama.cpp"]
    missing = peer_subject(peer, work, None)
    assert isinstance(missing, Skipped)
    assert "add --gguf FILE" in missing.reason
    ready(work, "llama.cpp")
    (tmp_path / "Some-Model.Q4_1.gguf").write_bytes(b"GGUF")
    found = peer_subject(peer, work, tmp_path / "Some-Model.Q4_1.gguf")
    assert isinstance(found, Subject)
    assert found.name == "llama.cpp Q4_1"


def test_transformers_reads_the_checkpoint_itself(tmp_path: Path) -> None:
    work = WorkFolder(tmp_path, TINY)
    ready(work, "transformers")
    found = peer_subject(BY_NAME["transformers float32"], work, None)
    assert isinstance(found, Subject)
    assert found.model == TINY


def test_the_work_folder_needs_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(InputFault, match=r"has no config\.json: expected a Hugging Face checkpoint folder"):
        WorkFolder(tmp_path, tmp_path)


def test_the_fingerprint_depends_on_config_and_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", "utf-8")
    (tmp_path / "model.safetensors").write_bytes(bytes(10_000))
    first = fingerprint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(bytes(9_999) + b"1")
    second = fingerprint(tmp_path)
    (tmp_path / "config.json").write_text("{} ", "utf-8")
    assert len({first, second, fingerprint(tmp_path)}) == 3
