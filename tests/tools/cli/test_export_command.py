"""`spaceport export`: published weights are adopted on the way."""

from __future__ import annotations

from pathlib import Path

import pytest

from spaceport.exporter.checkpoint import open_checkpoint, quiet_libraries
from spaceport.exporter.checkpoint_files import ModelFiles
from spaceport.exporter.export import ExportOptions
from spaceport.graphs.contract.faults import OptionFault
from spaceport.tools.cli import INPUT, OK, USAGE, run
from support.published import METHODS, SLOTS, PublishedModel, exact_model, write_checkpoint

Capture = pytest.CaptureFixture[str]
_REFUSED = ("--format", "int8", "--lowering", "append")  # found once the adapter was read


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> None:
    quiet_libraries()


def published(name: str, folder: Path) -> PublishedModel:
    folder.mkdir()
    return METHODS[name](folder)


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("name", ["uno", "medusa"])
def test_an_export_adopts_published_weights_as_adopt_does(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, work = published(name, tmp_path / "models"), tmp_path / "work"
    work.mkdir()
    assert run(["adopt", str(model.base), str(model.weights), str(tmp_path / "adapter"), *model.options]) == OK

    def stop(files: ModelFiles, bundle: Path, options: ExportOptions, *_: object) -> None:
        assert options.adapter is not None
        assert contents(options.adapter) == contents(tmp_path / "adapter")
        assert open_checkpoint(files, options.tokens, adapter=options.adapter).drafts.max_tokens == SLOTS
        raise OptionFault("stopped")

    monkeypatch.setattr("spaceport.exporter.export.export", stop)
    export = ["export", str(model.base), str(work / "bundle"), "--adapter", str(model.weights), *model.options]
    assert run(export) == USAGE
    assert names(work) == set()


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ("--adapter uno --format int8 --lowering append", USAGE, "lowering is append"),  # an error after the adoption
        ("--adapter uno --fork-token 5", USAGE, "--fork-token has no effect with published weights: name both tokens"),
        ("--adapter uno --mask-token 638", USAGE, "--mask-token has no effect: UNO has random tokens instead"),
        ("--adapter own --method uno", USAGE, "--method has no effect with an adapter folder: the folder says how it"),
        ("--method uno", INPUT, "config.json names no mask token"),
        ("--method medusa", INPUT, "has nothing of --method medusa: expected medusa_lm_head.safetensors or"),
    ],
)
def test_options_that_do_not_fit_are_refused_and_leave_nothing(
    options: str, code: int, message: str, tmp_path: Path, capsys: Capture
) -> None:
    model = published("uno", tmp_path / "models")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "base.json").write_text("{}")
    paths = {name: str(tmp_path / name) for name in ("own", "models", "nowhere")} | {"uno": str(model.weights)}
    words = options.split()
    if "--adapter" in words:
        words[1] = paths[words[1]]
    assert run(["export", str(model.base), str(tmp_path / "bundle"), *words]) == code
    assert message in capsys.readouterr().err
    assert names(tmp_path) == {"models", "own"}


def test_heads_and_adapters_inside_the_checkpoint_are_used_if_named_and_not_left_out_in_silence(
    tmp_path: Path, capsys: Capture
) -> None:
    whole = write_checkpoint(tmp_path / "whole", exact_model(), medusa_num_heads=SLOTS)
    assert run(["export", str(whole), str(tmp_path / "bundle"), *_REFUSED]) == USAGE
    assert "the checkpoint's heads are not used: add --method medusa" in capsys.readouterr().err
    model = published("uno", tmp_path / "models")
    assert model.weights is not None
    inside = model.weights.rename(model.base / "adapter")
    export = ["export", str(model.base), str(tmp_path / "bundle"), *_REFUSED]
    assert run([*export, "--method", "uno"]) == USAGE
    assert "adopting UNO" in capsys.readouterr().err
    assert run(export) == USAGE
    assert f"{inside} is not used: add --adapter {inside} to draft with it" in capsys.readouterr().err
    assert names(tmp_path) == {"models", "whole"}
