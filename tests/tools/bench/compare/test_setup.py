"""Setup: conversions are the peers' documented commands, and a failure leaves no model and does not stop the others."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from spaceport.tools.bench.compare.setup import (
    CommandFailed,
    conversion,
    convert,
    give_begin_token,
    group_size,
    run,
    set_up,
)
from spaceport.tools.bench.compare.subjects import chosen
from spaceport.tools.bench.compare.work_folder import WorkFolder
from support.paths import TINY

CONVERTER = """#!{python}
import json, pathlib, sys
target = pathlib.Path(sys.argv[sys.argv.index("--output_dir") + 1])
target.mkdir()
(target / "config.json").write_text(json.dumps({{"bos_token": None, "eos_token": "</s>"}}))
print("converted")
sys.exit({code})
"""


def quiet(_: str) -> None:
    pass


def installed(folder: Path, code: int = 0) -> WorkFolder:
    """A work folder whose converter is a script."""
    work = WorkFolder(folder, TINY)
    for name in ("ctranslate2", "convert", "openvino-genai"):
        work.python(name).parent.mkdir(parents=True)
        work.record_installed(name)
    script = work.python("convert").parent / "ct2-transformers-converter"
    script.write_text(CONVERTER.format(python=sys.executable, code=code), "utf-8")
    script.chmod(0o755)
    return work


@pytest.mark.parametrize(
    ("model", "command"),
    [
        ("genai-int4", "python -m onnxruntime_genai.models.builder -m C -i C -o t -p int4 -e cpu"),
        (
            "genai-int4-pruned",
            "python -m onnxruntime_genai.models.builder -m C -i C -o t -p int4 -e cpu --extra_options prune_lm_head=true",
        ),
        (
            "openvino-int8",
            "optimum-cli export openvino --model C --task text-generation-with-past --weight-format int8 t",
        ),
        (
            "openvino-int4",
            "optimum-cli export openvino --model C --task text-generation-with-past --weight-format int4 --group-size 64 t",
        ),
        ("ctranslate2-int8", "ct2-transformers-converter --model C --output_dir t --quantization int8"),
    ],
)
def test_conversions_are_the_documented_commands(model: str, command: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 576, "intermediate_size": 1536}', "utf-8")
    expected = [str(tmp_path) if word == "C" else word for word in f"e/bin/{command}".split()]
    assert conversion(model, Path("e/bin/python"), tmp_path, Path("t")) == expected


@pytest.mark.parametrize(("width", "size"), [(768, 128), (576, 64), (96, 32), (80, 16)])
def test_the_group_size_divides_the_widths_of_the_checkpoint(width: int, size: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": width, "intermediate_size": 4096}), "utf-8")
    assert group_size(tmp_path) == size


def test_a_model_is_converted_once(tmp_path: Path) -> None:
    work, messages = installed(tmp_path), []
    assert set_up(work, chosen("ctranslate2"), messages.append) == []
    assert set_up(work, chosen("ctranslate2"), messages.append) == []
    assert messages == [f"convert {TINY.name} to ctranslate2-int8"]
    config = json.loads((work.model("ctranslate2-int8") / "config.json").read_text("utf-8"))
    assert config["bos_token"] == "</s>"
    assert "converted" in (work.logs / "convert-ctranslate2-int8.log").read_text("utf-8")


def test_a_conversion_that_fails_leaves_no_model_and_the_others_continue(tmp_path: Path) -> None:
    work = installed(tmp_path, code=3)
    failed = set_up(work, chosen("openvino-genai int8,ctranslate2"), quiet)
    assert [peer.name for peer in failed] == ["openvino-genai int8", "ctranslate2 int8"]
    assert "optimum-cli: No such file or directory" in failed[0].reason
    assert "exit code 3: … " in failed[1].reason
    assert "converted" in failed[1].reason
    assert not work.model("ctranslate2-int8").exists()
    with pytest.raises(CommandFailed):
        convert(work, "ctranslate2-int8")


def test_an_existing_begin_token_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}', "utf-8")
    give_begin_token(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text("utf-8"))["bos_token"] == "<s>"


def test_a_command_is_logged_with_its_output(tmp_path: Path) -> None:
    run([sys.executable, "-c", "print(3)"], tmp_path / "logs" / "a.log")
    assert (tmp_path / "logs" / "a.log").read_text("utf-8").splitlines()[1:] == ["3"]
