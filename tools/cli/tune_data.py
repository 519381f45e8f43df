"""`spaceport tune data`: show which answers in training data fork, and write the training rows."""

from __future__ import annotations

import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from spaceport.graphs.contract.faults import OptionFault
from spaceport.tools.cli.options import PATH, json_option, overwrite_option
from spaceport.tools.terminal.screen import show_json, show_table, stages
from spaceport.tools.tune.conversation_encoder import ConversationEncoder
from spaceport.tools.tune.conversations import read_conversations
from spaceport.tools.tune.extract import Extraction, Refusal, Tree, count_extractions, extraction_of
from spaceport.tools.tune.samples import Sample, check_target, rows_of, write_rows
from spaceport.tools.tune.settings import TrainingSettings

Extracted = Sequence[tuple[Path, list[Extraction]]]  # data files, with the extraction results of their conversations


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
    if example is not None and len(files) > 1:
        raise OptionFault(
            f"--example {example} with {len(files)} files: expected one file, since line numbers are per file"
        )
    cutoff = TrainingSettings(cutoff=cutoff).cutoff
    _check_rows(files, checkpoint, rows, overwrite)
    extracted: list[tuple[Path, list[Extraction]]] = []
    written: dict[str, Any] | None = None
    with stages() as stage:
        for file in files:
            stage(f"reading {file}")
            extracted.append((file, [extraction_of(conversation) for conversation in read_conversations(file)]))
        shown = chosen(extracted, example)
        if checkpoint is not None and rows is not None:
            stage(f"opening {checkpoint}")
            encoder = _encoder_of(checkpoint, trust_remote_code)
            stage(f"writing {rows}")
            written = _write(extracted, encoder, cutoff, rows, overwrite)
            if not encoder.forks:
                click.echo(f"{checkpoint} has no fork token, so no row forks; `spaceport tune` adds one", err=True)
    counts = [count_extractions(extractions) for _, extractions in extracted]
    total = count_extractions([extraction for _, extractions in extracted for extraction in extractions])
    if as_json:
        listed = [{"file": str(file), **counted} for file, counted in zip(files, counts, strict=True)]
        example_data = None if shown is None else _example(*shown)
        show_json({"files": listed, "all": total, "example": example_data, "written": written})
        return
    show(files, counts, total)
    if shown is not None:
        show_example(*shown)
    if written is not None:
        show_table(f"\n{rows}: {written['rows']} rows", ("what", "count"), list(written["counts"].items()))


def _check_rows(files: Sequence[Path], checkpoint: Path | None, rows: Path | None, overwrite: bool) -> None:
    """Raise if rows are asked for and cannot be written."""
    if checkpoint is None and rows is None:
        return
    if checkpoint is None or rows is None:
        named, lacking = ("--rows", "--checkpoint") if checkpoint is None else ("--checkpoint", "--rows")
        raise OptionFault(
            f"{named} without {lacking}: rows are encoded with a checkpoint's tokenizer; give both or neither"
        )
    if any(rows.resolve() == file.resolve() for file in files):
        raise OptionFault(f"--rows {rows} is an input file and would be overwritten: choose another name")
    check_target(rows, overwrite)


def chosen(extracted: Extracted, example: int | None) -> tuple[Path, Extraction] | None:
    """The extraction to show: that of line `example`, or the first tree."""
    extractions = [(file, extraction) for file, listed in extracted for extraction in listed]
    if example is None:
        return next((shown for shown in extractions if isinstance(shown[1].result, Tree)), None)
    for file, extraction in extractions:
        if extraction.conversation.line == example:
            return file, extraction
    raise OptionFault(
        f"--example {example}: no conversation on this line of {extracted[0][0]}: expected one of its "
        f"{len(extractions)} non-blank lines, from {extractions[0][1].conversation.line} to "
        f"{extractions[-1][1].conversation.line}"
    )


def show(files: Sequence[Path], counts: Sequence[dict[str, Any]], total: dict[str, Any]) -> None:
    """Print the counts per file and in total, and why answers have no tree."""
    names = list(map(str, files))
    if len(files) > 1:
        counts, names = [*counts, total], [*names, "all"]
    lines: list[tuple[str, Callable[[dict[str, Any]], object]]] = [
        ("conversations", lambda counted: counted["conversations"]),
        ("answers", lambda counted: counted["answers"]),
        ("marked as unforked", lambda counted: counted["marked_unforked"]),
        ("forked as a list", lambda counted: counted["forked"]["list"]),
        ("forked as paragraphs", lambda counted: counted["forked"]["paragraphs"]),
        ("forks per tree, mean", lambda counted: counted["forks_per_tree"]["mean"]),
        ("forks per tree, max", lambda counted: counted["forks_per_tree"]["max"]),
        ("characters of answers", lambda counted: counted["characters"]),
        ("fraction in details", _share_in_details),
    ]
    show_table("", ("what", *names), [(label, *map(number, counts)) for label, number in lines])
    if total["refusals"]:
        refused = [
            (reason, *(counted["refusals"].get(reason, 0) for counted in counts)) for reason in total["refusals"]
        ]
        show_table("\nAnswers without a tree", ("reason", *names), refused)


def _share_in_details(counted: dict[str, Any]) -> float | None:
    return counted["characters_in_details"] / counted["characters"] if counted["characters"] else None


def show_example(file: Path, extraction: Extraction) -> None:
    """Print one tree: each head with the detail that a child thread generates."""
    label = f"{file} line {extraction.conversation.line}: "
    if not isinstance(extraction.result, Tree):
        click.echo(f"\n{label}no tree: {_refused(extraction)}")
        return
    tree = extraction.result
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


def _encoder_of(checkpoint: Path, remote_code: bool) -> ConversationEncoder:
    # torch and transformers are imported only for writing rows
    from spaceport.exporter.checkpoint_source import quiet_libraries
    from spaceport.tools.tune.tunable_model import checkpoint_encoder

    quiet_libraries()
    return checkpoint_encoder(checkpoint, remote_code)


def _write(
    extracted: Extracted, encoder: ConversationEncoder, cutoff: int, target: Path, overwrite: bool
) -> dict[str, Any]:
    """Write the rows; return their number and the sample counts."""
    samples: list[tuple[Path, Sample]] = []
    counts: Counter[str] = Counter()
    for file, extractions in extracted:
        conversations = [extraction.conversation for extraction in extractions]
        rows, counted = rows_of(file, conversations, encoder, cutoff)
        samples += [(file, sample) for sample in rows]
        counts += counted
    write_rows(target, samples, overwrite)
    return {"file": str(target), "rows": len(samples), "counts": dict(counts)}


def _refused(extraction: Extraction) -> str:
    if isinstance(extraction.result, Refusal):
        return extraction.result.reason
    return "no answer in it" if extraction.conversation.answer is None else 'the line has "fork": false'


def _example(file: Path, extraction: Extraction) -> dict[str, Any]:
    place: dict[str, Any] = {"file": str(file), "line": extraction.conversation.line}
    if not isinstance(extraction.result, Tree):
        return {**place, "kind": None, "reason": _refused(extraction)}
    paragraphs = [{"head": piece.head, "detail": piece.detail} for piece in extraction.result.paragraphs]
    return {**place, "kind": extraction.result.kind, "paragraphs": paragraphs}


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
