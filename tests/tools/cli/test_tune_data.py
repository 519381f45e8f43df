"""`spaceport tune data`: counts, example tree and training rows of a data file."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click import UsageError
from click.testing import CliRunner, Result
from tokenizers import Tokenizer

from spaceport.graphs.contract.faults import InputFault, OptionFault
from spaceport.tools.cli.tune_data import command
from spaceport.tools.tune.conversations import read_conversations
from spaceport.tools.tune.extract import count_extractions, extraction_of
from support.paths import TINY

FORK, CHILD = 630, 631  # the model has rows for them, and no text can hold them
LIST = "Three:\n\n1. Red: the colour of fire\n2. Green: the colour of grass\n3. Blue: the colour of the sea\n\nDone."
PROSE = "\n\n".join(f"This is paragraph number {i}. Here it goes on." for i in range(4))
ANSWERS = (LIST, "Yes.", PROSE, "a = b", "No.", LIST.replace("Done.", "Done.\x1b[2J"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A file with a blank line, six answers and a plain text."""
    lines = ["", *(json.dumps({"prompt": "Which?", "response": answer}) for answer in ANSWERS), '{"text": "Plain."}']
    return written(tmp_path / "data.jsonl", lines)


@pytest.fixture
def forking(tmp_path: Path) -> Path:
    """A checkpoint with fork tokens."""
    folder = shutil.copytree(TINY, tmp_path / "checkpoint")
    config = {"mask_tokens": ["[M]"], "mask_slots": 5, "fork_token": str(FORK), "child_token": str(CHILD)}
    (folder / "sar_config.json").write_text(json.dumps(config))
    return folder


def written(file: Path, lines: Sequence[str]) -> Path:
    file.write_text("\n".join(lines), "utf-8")
    return file


def tried(*arguments: object) -> Result:
    return CliRunner().invoke(command, list(map(str, arguments)), standalone_mode=False)


def printed(*arguments: object) -> str:
    result = tried(*arguments)
    if result.exception:
        raise result.exception
    return result.stdout


def rows_in(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


def refused(kind: type[Exception], message: str, *arguments: object) -> None:
    result = tried(*arguments)
    assert isinstance(result.exception, kind), result.exception
    assert re.search(message, str(result.exception))
    assert result.stdout == ""


def test_a_report_counts_what_the_extractors_found(data: Path) -> None:
    found = count_extractions([extraction_of(conversation) for conversation in read_conversations(data)])
    details = 2 * len(" the colour of fire the colour of grass the colour of the sea") + 4 * len(" Here it goes on.")
    assert found == {
        "conversations": 7,
        "answers": 6,
        "marked_unforked": 0,
        "forked": {"list": 2, "paragraphs": 1},
        "forks": 10,
        "forks_per_tree": {"mean": 10 / 3, "max": 4},
        "characters": sum(map(len, ANSWERS)),
        "characters_in_details": details,
        "refusals": {"fewer than 3 paragraphs": 2, "equals sign": 1},
    }
    assert list(found["refusals"]) == ["fewer than 3 paragraphs", "equals sign"]


def test_output_without_a_terminal_is_plain_text(data: Path) -> None:
    blocks = printed(data).split("\n\n")
    table, reasons = (
        dict(re.split(r"  +", line) for line in block.splitlines() if "  " in line) for block in blocks[:2]
    )
    assert table.items() >= {"conversations": "7", "answers": "6", "forked as a list": "2"}.items()
    assert reasons == {"reason": str(data), "fewer than 3 paragraphs": "2", "equals sign": "1"}
    found = json.loads(printed(data, "--json", "--example", 2))
    assert found["files"] == [{"file": str(data), **found["all"]}]
    joined = "".join(piece["head"] + (piece["detail"] or "") for piece in found["example"]["paragraphs"])
    assert (found["example"]["line"], found["example"]["kind"], joined) == (2, "list", LIST)
    assert blocks[2].startswith(f"{data} line 2: a list, 3 forks\n  Three: 1. Red:\n      the colour of fire\n")


def test_an_example_is_chosen_by_its_line_without_control_characters(data: Path, tmp_path: Path) -> None:
    tree = printed(data, "--example", 4).split("\n\n")[-1].splitlines()
    first = ["  This is paragraph number 0.", "      Here it goes on."]
    assert tree[:3] == [f"{data} line 4: paragraphs, 4 forks", *first]
    assert printed(data, "--example", 5).endswith(f"\n\n{data} line 5: no tree: equals sign\n")
    assert printed(data, "--example", 8).endswith(f"\n\n{data} line 8: no tree: no answer in it\n")
    assert printed(data, "--example", 7).endswith("  Done.\ufffd[2J\n")
    file = written(tmp_path / "a.jsonl", ['{"prompt": "Which?", "response": "Yes."}'])
    assert len(printed(file).split("\n\n")) == 2  # without a tree no example is shown


@pytest.mark.torch
def test_rows_are_written_in_the_files_order_and_forked(data: Path, forking: Path, tmp_path: Path) -> None:
    target = tmp_path / "rows.jsonl"
    assert f"\n{target}: 14 rows\n" in printed(data, data, "--checkpoint", forking, "--rows", target)
    rows = rows_in(target)
    assert [(row["file"], row["line"]) for row in rows] == [(str(data), line) for line in range(2, 9)] * 2
    assert [row["ids"].count(FORK) for row in rows] == [3, 0, 4, 0, 0, 3, 0] * 2
    tokenizer = Tokenizer.from_file(str(forking / "tokenizer.json"))
    for row in rows:
        ids, parents, learned = row["ids"], row["parents"], row["learned"]
        assert len(ids) == len(parents) == len(learned)
        assert parents[0] == -1
        assert all(-1 < parent < index for index, parent in enumerate(parents) if index)
        children = [index for index, token in enumerate(ids) if token == CHILD]
        assert [ids[parents[index]] for index in children] == [FORK] * ids.count(FORK)
        assert not any(learned[index] for index in children)
    taught = [token for token, counted in zip(rows[0]["ids"], rows[0]["learned"], strict=True) if counted]
    parts = tokenizer.decode([token for token in taught if token != FORK])
    assert parts == LIST


@pytest.mark.torch
def test_rows_of_a_checkpoint_without_a_fork_token_do_not_fork_and_end_at_the_cutoff(
    data: Path, tmp_path: Path
) -> None:
    target = tmp_path / "rows.jsonl"
    result = tried(data, "--checkpoint", TINY, "--rows", target, "--cutoff", 40, "--json")
    assert json.loads(result.stdout)["written"]["rows"] == 7
    assert result.stderr.endswith(f"{TINY} has no fork token, so no row forks; `spaceport tune` adds one\n")
    assert all(row["parents"] == list(range(-1, len(row["ids"]) - 1)) for row in rows_in(target))
    assert max(len(row["ids"]) for row in rows_in(target)) == 40
    refused(OptionFault, "--cutoff is 7: expected at least 8", data, "--cutoff", 7)


@pytest.mark.torch
def test_rows_overwrite_a_file_only_on_request(data: Path, tmp_path: Path) -> None:
    target, link, kept = written(tmp_path / "rows.jsonl", ["mine"]), tmp_path / "link.jsonl", data.read_bytes()
    order = [data, "--checkpoint", TINY, "--rows"]
    refused(InputFault, f"{target}: exists already: use --overwrite to replace it", *order, target)
    assert target.read_text() == "mine"
    printed(*order, target, "--overwrite")
    assert len(rows_in(target)) == 7
    link.symlink_to(target)
    refused(OptionFault, "is an input file and would be overwritten: choose another name", *order, data, "--overwrite")
    for other in (link, tmp_path):
        refused(InputFault, "exists and is not a file: choose another name", *order, other, "--overwrite")
    refused(InputFault, "nowhere: no such folder: create it first", *order, tmp_path / "nowhere" / "rows.jsonl")
    assert data.read_bytes() == kept
    assert {file.name for file in tmp_path.iterdir()} == {"data.jsonl", "rows.jsonl", "link.jsonl"}


def test_invalid_options_are_refused(data: Path, tmp_path: Path) -> None:
    refused(OptionFault, "--rows without --checkpoint: .*; give both or neither", data, "--rows", tmp_path / "rows")
    refused(OptionFault, "--checkpoint without --rows: .*; give both or neither", data, "--checkpoint", TINY)
    refused(OptionFault, "--example 2 with 2 files: expected one file", data, data, "--example", 2)
    for line in (1, 9, 0, -1):
        message = f"--example {line}: no conversation on this line of .*: expected one of its 7 .*, from 2 to 8"
        refused(OptionFault, message, data, "--example", line)
    refused(InputFault, "nowhere.jsonl: no such file", tmp_path / "nowhere.jsonl")
    refused(UsageError, "Missing parameter: files")
