"""`spaceport tune data`: show which answers in training data fork, and write the training rows."""

from __future__ import annotations

import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from spaceport.graphs.contract.faults import OptionFault
from spaceport.tools.cli.options import PATH, json_option, overwrite_option
from spaceport.tools.terminal.screen import show_json, show_table, stages
from spaceport.tools.tune.conversations import read_conversations
from spaceport.tools.tune.extract import Extraction, ExtractionCounts, Refusal, Tree, count_extractions, extraction_of
from spaceport.tools.tune.samples import Sample, check_target, rows_of, write_rows
from spaceport.tools.tune.settings import TrainingSettings


@dataclass(frozen=True)
class ExtractedFile:
    """A data file and the extraction results of its conversations."""

    path: Path
    extractions: list[Extraction]


@dataclass(frozen=True)
class RowsTarget:
    """The rows file to write, and the options that determine its content."""

    checkpoint: Path
    file: Path
    cutoff: int
    overwrite: bool
    remote_code: bool


@click.command("data")
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=PATH)
@click.option("--example", type=int, metavar="N", show_default="first tree", help="Show the paragraph tree of line N.")
@click.option(
    "--checkpoint",
    type=PATH,
    metavar="DIR",
    help="Checkpoint whose tokenizer and chat template encode the rows.",
)
@click.option("--rows", type=PATH, metavar="OUT", help="Write the training rows as JSONL.")
@click.option(
    "--cutoff",
    default=TrainingSettings().cutoff,
    show_default=True,
    metavar="N",
    help="Maximum row length in tokens along a path.",
)
@overwrite_option("rows file")
@click.option("--trust-remote-code", is_flag=True, help="Run model code from the checkpoint.")
@json_option("the result")
def command(
    files: tuple[Path, ...],
    example: int | None,
    checkpoint: Path | None,
    rows: Path | None,
    cutoff: int,
    overwrite: bool,
    trust_remote_code: bool,
    as_json: bool,
) -> None:
    """Show how many answers in FILE (JSONL) fork, why the others do not, and the paragraph tree of one answer.

    Only the last answer of a conversation can fork. With --checkpoint and --rows, the training rows are written as
    JSONL: token ids, the index of each token's parent (-1 for the first), and which tokens have a loss.
    """
    check_options(files, example)
    target = target_of(files, checkpoint, rows, TrainingSettings(cutoff=cutoff).cutoff, overwrite, trust_remote_code)
    with stages() as stage:
        extracted = [_read(file, stage) for file in files]
        shown = chosen(extracted, example)
        written = None if target is None else _write(extracted, target, stage)
    if as_json:
        show_json(as_dict(extracted, shown, written))
        return
    show(extracted)
    if shown is not None:
        show_example(*shown)
    if written is not None:
        show_table(f"\n{rows}: {written['rows']} rows", ("what", "count"), list(written["counts"].items()))


def check_options(files: Sequence[Path], example: int | None) -> None:
    """Raise for invalid options before any file is opened."""
    if example is not None and len(files) > 1:
        raise OptionFault(
            f"--example {example} with {len(files)} files: expected one file, since line numbers are per file"
        )


def target_of(
    files: Sequence[Path], checkpoint: Path | None, rows: Path | None, cutoff: int, overwrite: bool, remote_code: bool
) -> RowsTarget | None:
    """The rows file to write, or None; raise if it cannot be written."""
    if checkpoint is None and rows is None:
        return None
    if checkpoint is None or rows is None:
        given, lacking = ("--rows", "--checkpoint") if checkpoint is None else ("--checkpoint", "--rows")
        raise OptionFault(
            f"{given} without {lacking}: rows are encoded with a checkpoint's tokenizer; give both or neither"
        )
    if any(rows.resolve() == file.resolve() for file in files):
        raise OptionFault(f"--rows {rows} is an input file and would be overwritten: choose another name")
    check_target(rows, overwrite)
    return RowsTarget(checkpoint, rows, cutoff, overwrite, remote_code)


def chosen(extracted: Sequence[ExtractedFile], example: int | None) -> tuple[Path, Extraction] | None:
    """The extraction to show: that of line `example`, or the first tree."""
    extractions = [(file.path, extraction) for file in extracted for extraction in file.extractions]
    if example is None:
        return next((found for found in extractions if isinstance(found[1].found, Tree)), None)
    for file, extraction in extractions:
        if extraction.conversation.line == example:
            return file, extraction
    raise OptionFault(
        f"--example {example}: no conversation on this line of {extracted[0].path}: expected one of its "
        f"{len(extractions)} non-blank lines, from {extractions[0][1].conversation.line} to "
        f"{extractions[-1][1].conversation.line}"
    )


def show(extracted: Sequence[ExtractedFile]) -> None:
    """Print the counts per file and in total, and why answers have no tree."""
    counts = [count_extractions(file.extractions) for file in extracted]
    names = [str(file.path) for file in extracted]
    total = _total(extracted)
    if len(extracted) > 1:
        counts, names = [*counts, total], [*names, "all"]
    lines: list[tuple[str, Callable[[ExtractionCounts], object]]] = [
        ("conversations", lambda found: found.conversations),
        ("answers", lambda found: found.answers),
        ("marked as unforked", lambda found: found.marked_unforked),
        ("forked as a list", lambda found: found.lists),
        ("forked as paragraphs", lambda found: found.paragraphs),
        ("forks per tree, mean", lambda found: found.mean_forks),
        ("forks per tree, max", lambda found: found.most_forks or None),
        ("characters of answers", lambda found: found.characters),
        ("fraction in details", lambda found: found.detail_share),
    ]
    show_table("", ("what", *names), [(label, *map(number, counts)) for label, number in lines])
    if total.refusals:
        refused = [(reason, *(found.refusals.get(reason, 0) for found in counts)) for reason in total.refusals]
        show_table("\nAnswers without a tree", ("reason", *names), refused)


def show_example(file: Path, extraction: Extraction) -> None:
    """Print one tree: each head with the detail that a child thread generates."""
    label = f"{file} line {extraction.conversation.line}: "
    if not isinstance(extraction.found, Tree):
        click.echo(f"\n{label}no tree: {_refused(extraction)}")
        return
    tree = extraction.found
    label += f"{'a list' if tree.kind == 'list' else 'paragraphs'}, {tree.forks} forks"
    pieces = [(_line(paragraph.head), paragraph.detail) for paragraph in tree.paragraphs if paragraph.head.strip()]
    click.echo()
    if sys.stdout.isatty():
        _draw(label, pieces)
        return
    click.echo(label)
    for head, detail in pieces:
        click.echo(f"  {head}")
        if detail is not None:
            click.echo(f"      {_line(detail)}")


def as_dict(
    extracted: Sequence[ExtractedFile], shown: tuple[Path, Extraction] | None, written: dict[str, Any] | None
) -> dict[str, Any]:
    """The same result as JSON-compatible data."""
    return {
        "files": [{"file": str(file.path), **count_extractions(file.extractions).as_dict()} for file in extracted],
        "all": _total(extracted).as_dict(),
        "example": None if shown is None else _example(*shown),
        "written": written,
    }


def _read(file: Path, stage: Callable[[str], None]) -> ExtractedFile:
    stage(f"reading {file}")
    return ExtractedFile(file, [extraction_of(conversation) for conversation in read_conversations(file)])


def _write(extracted: Sequence[ExtractedFile], target: RowsTarget, stage: Callable[[str], None]) -> dict[str, Any]:
    """Write the rows; return their number and the sample counts."""
    stage(f"opening {target.checkpoint}")
    # torch and transformers are imported only for writing rows
    from spaceport.exporter.checkpoint_source import quiet_libraries
    from spaceport.tools.tune.tunable_model import checkpoint_encoder

    quiet_libraries()
    encoder = checkpoint_encoder(target.checkpoint, target.remote_code)
    stage(f"writing {target.file}")
    samples: list[tuple[Path, Sample]] = []
    counts: Counter[str] = Counter()
    for file in extracted:
        conversations = [extraction.conversation for extraction in file.extractions]
        found, counted = rows_of(file.path, conversations, encoder, target.cutoff)
        samples += [(file.path, sample) for sample in found]
        counts += counted
    write_rows(target.file, samples, target.overwrite)
    if not encoder.forks:
        click.echo(f"{target.checkpoint} has no fork token, so no row forks; `spaceport tune` adds one", err=True)
    return {"file": str(target.file), "rows": len(samples), "counts": dict(counts)}


def _total(extracted: Sequence[ExtractedFile]) -> ExtractionCounts:
    return count_extractions([extraction for file in extracted for extraction in file.extractions])


def _refused(extraction: Extraction) -> str:
    if isinstance(extraction.found, Refusal):
        return extraction.found.reason
    return "no answer in it" if extraction.conversation.answer is None else 'the line has "fork": false'


def _example(file: Path, extraction: Extraction) -> dict[str, Any]:
    found: dict[str, Any] = {"file": str(file), "line": extraction.conversation.line}
    if not isinstance(extraction.found, Tree):
        return {**found, "kind": None, "reason": _refused(extraction)}
    paragraphs = [{"head": piece.head, "detail": piece.detail} for piece in extraction.found.paragraphs]
    return {**found, "kind": extraction.found.kind, "paragraphs": paragraphs}


def _line(text: str) -> str:
    """A text on one line, without control characters."""
    line = " ".join(text.split())
    return "".join("\ufffd" if unicodedata.category(sign) == "Cc" else sign for sign in line)


def _draw(label: str, pieces: Sequence[tuple[str, str | None]]) -> None:
    from rich import tree
    from rich.console import Console
    from rich.text import Text

    root = tree.Tree(Text(label))
    for head, detail in pieces:
        branch = root.add(Text(head, "bold"))
        if detail is not None:
            branch.add(Text(_line(detail), "cyan"))
    Console().print(root)
