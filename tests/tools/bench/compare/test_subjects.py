"""Subjects: bundles are named after their weights, missing peers are skipped with advice, and models converted."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from spaceport.graphs.contract.faults import InputFault, OptionFault
from spaceport.tools.bench.compare.machine import this_machine
from spaceport.tools.bench.compare.pins import ENVIRONMENTS
from spaceport.tools.bench.compare.setup import (
    conversion,
    group_size,
    set_up,
)
from spaceport.tools.bench.compare.subjects import (
    ADAPTERS,
    PEERS,
    Skipped,
    Subject,
    bundle_subjects,
    chosen,
    peer_subject,
)
from spaceport.tools.bench.compare.work_folder import WorkFolder
from support.fake_subjects import installed
from support.paths import TINY

BY_NAME = {peer.name: peer for peer in PEERS}


CONVERTER = """#!{python}
import json, pathlib, sys
target = pathlib.Path(sys.argv[sys.argv.index("--output_dir") + 1])
target.mkdir()
(target / "config.json").write_text(json.dumps({{"bos_token": None, "eos_token": "</s>"}}))
print("converted")
sys.exit({code})
"""


def converting(folder: Path, code: int = 0) -> WorkFolder:
    """A work folder whose converter is a script."""
    work = WorkFolder(folder, TINY)
    for name in ("ctranslate2", "convert", "openvino-genai"):
        installed(work, name)
    script = work.python("convert").parent / "ct2-transformers-converter"
    script.write_text(CONVERTER.format(python=sys.executable, code=code), "utf-8")
    script.chmod(0o755)
    return work


def skipped(peer: str, work: WorkFolder) -> str:
    """Why a peer is skipped."""
    found = peer_subject(BY_NAME[peer], work, None)
    assert isinstance(found, Skipped)
    return found.reason


def subject(peer: str, work: WorkFolder, gguf: Path | None = None) -> Subject:
    found = peer_subject(BY_NAME[peer], work, gguf)
    assert isinstance(found, Subject)
    return found


def test_every_peer_has_an_adapter_and_pins() -> None:
    for peer in PEERS:
        assert (ADAPTERS / peer.adapter).is_file()
        assert peer.environment in ENVIRONMENTS
    for name, requirements in ENVIRONMENTS.items():
        assert all(re.fullmatch(r"[\w.-]+(\[\w+\])?==[\w.]+", one) for one in requirements), name


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
    names = ["spaceport float32", "spaceport float16", "spaceport float32 (again)"]
    assert [subject.name for subject in found] == names
    assert all(subject.is_bundle and subject.python == Path(sys.executable) for subject in found)
    with pytest.raises(OptionFault, match="given twice"):
        bundle_subjects([tiny_bundle, tmp_path / "again", tmp_path / "again"])


def test_a_peer_is_skipped_until_its_environment_and_model_exist(tmp_path: Path) -> None:
    work = WorkFolder(tmp_path, TINY)
    assert f"at {tmp_path}/environments/ctranslate2: add --setup" in skipped("ctranslate2 int8", work)
    installed(work, "ctranslate2")
    assert f"no converted model at {work.models}/ctranslate2-int8: add --setup" in skipped("ctranslate2 int8", work)
    work.model("ctranslate2-int8").mkdir(parents=True)
    found = subject("ctranslate2 int8", work)
    assert (found.name, found.options, found.is_bundle) == ("ctranslate2 int8", {"compute_type": "int8"}, False)
    (record,) = work.environment("ctranslate2").glob("*.json")
    record.write_text(json.dumps(["ctranslate2==1.0"]), "utf-8")  # other pins
    assert not work.installed("ctranslate2")
    installed(work, "onnxruntime-genai")
    work.model("genai-int4-pruned").mkdir(parents=True)
    assert skipped("onnxruntime-genai int4", work).endswith("genai-int4: add --setup")
    work.model("genai-int4").mkdir()  # for steps of several rows
    found = subject("onnxruntime-genai int4", work)
    assert (found.model.name, found.options) == ("genai-int4-pruned", {"rows_model": str(work.model("genai-int4"))})
    assert "add --gguf FILE" in skipped("llama.cpp", work)
    installed(work, "llama.cpp")
    (tmp_path / "Some-Model.Q4_1.gguf").write_bytes(b"GGUF")
    assert subject("llama.cpp", work, tmp_path / "Some-Model.Q4_1.gguf").name == "llama.cpp Q4_1"
    installed(work, "transformers")
    assert subject("transformers float32", work).model == TINY  # it reads the checkpoint itself
    with pytest.raises(InputFault, match=r"has no config\.json: expected a Hugging Face checkpoint folder"):
        WorkFolder(tmp_path, tmp_path)


def test_conversions_are_commands_and_the_group_size_divides_the_widths_of_the_checkpoint(tmp_path: Path) -> None:
    for width, size in ((768, 128), (576, 64), (96, 32), (80, 16)):
        (tmp_path / "config.json").write_text(json.dumps({"hidden_size": width, "intermediate_size": 4096}), "utf-8")
        assert group_size(tmp_path) == size
    command = conversion("openvino-int4", Path("e/bin/python"), tmp_path, Path("t"))
    assert command[:5] == ["e/bin/optimum-cli", "export", "openvino", "--model", str(tmp_path)]
    assert command[-3:] == ["--group-size", "16", "t"]
    command = conversion("genai-int4-pruned", Path("e/bin/python"), tmp_path, Path("t"))
    assert (command[0], command[-1]) == ("e/bin/python", "prune_lm_head=true")


def test_a_model_is_converted_once_and_a_failure_leaves_no_model_and_the_others_continue(tmp_path: Path) -> None:
    work = converting(tmp_path / "broken", code=3)
    failed = set_up(work, chosen("openvino-genai int8,ctranslate2"), print)
    assert [peer.name for peer in failed] == ["openvino-genai int8", "ctranslate2 int8"]
    assert "optimum-cli: No such file or directory" in failed[0].reason
    assert "exit code 3: … " in failed[1].reason
    assert not work.model("ctranslate2-int8").exists()
    work, messages = converting(tmp_path / "works"), list[str]()
    for _ in range(2):
        assert set_up(work, chosen("ctranslate2"), messages.append) == []
    assert messages == [f"convert {TINY.name} to ctranslate2-int8"]
    config = json.loads((work.model("ctranslate2-int8") / "config.json").read_text("utf-8"))
    assert config["bos_token"] == "</s>"


def test_the_first_cpu_of_cpuinfo_is_described(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    one = "processor\t: 0\nmodel name\t: Fast CPU 3\ncpu family\t: 6\nmodel\t: 207\nflags\t: fpu avx2 amx_int8 sse\n\n"
    file.write_text(one + one.replace("Fast", "Other"), "utf-8")
    found = this_machine(file)
    assert (found.cpu, found.model) == ("Fast CPU 3", "family 6, model 207")
    assert (found.flags, found.cores >= 1) == (("avx2", "amx_int8"), True)
