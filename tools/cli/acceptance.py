"""`spaceport acceptance`: measure draft acceptance rates of a checkpoint or a bundle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import ClassVar

import click

from spaceport.graphs.contract.faults import InputFault, OptionFault
from spaceport.runtime.session import Runtime
from spaceport.tools.cli.options import (
    PATH,
    Sectioned,
    adapter_option,
    json_option,
    remote_code_option,
    require_signature_option,
    threads_option,
)
from spaceport.tools.terminal.screen import show_json, show_table, stages
from spaceport.tools.tune.conversations import Conversation, read_conversations
from spaceport.tools.tune.samples import prepare
from spaceport.tools.verify.acceptance.measure import Acceptance, measure
from spaceport.tools.verify.acceptance.reference_answers import ReferenceAnswer, reference_answers
from spaceport.tools.verify.acceptance.source import conversation_encoder_for, open_source
from spaceport.tools.verify.acceptance.tally import ForkTally

_PLOTS = (".svg", ".png")


class AcceptanceCommand(Sectioned):
    """The command with its options in groups."""

    headings: ClassVar = {"limit": "Samples", "backend": "Backend", "plot": "Output"}


@click.command("acceptance", cls=AcceptanceCommand)
@click.argument("model", metavar="CHECKPOINT|BUNDLE", type=PATH)
@click.argument("data", type=PATH)
@adapter_option
@click.option("--limit", type=int, metavar="N", help="Use the first N conversations of DATA only.")
@click.option(
    "--max-tokens", default=256, show_default=True, metavar="N", help="Maximum number of tokens of a generated answer."
)
@click.option(
    "--max-mask-slots",
    type=int,
    metavar="K",
    help="Maximum number of mask slots or heads to measure; default: the model's.",
)
@click.option(
    "--max-seq-len", type=int, metavar="N", help="Maximum context length in tokens; longer answers are truncated."
)
@click.option(
    "--backend",
    type=click.Choice(("auto", "onnxruntime")),
    default="auto",
    show_default=True,
    help="Backend of a bundle.",
)
@threads_option
@require_signature_option
@remote_code_option
@click.option("--plot", type=PATH, metavar="FILE", help="Write a plot as .svg or .png.")
@json_option("the numbers")
def command(
    model: Path,
    data: Path,
    adapter: Path | None,
    limit: int | None,
    max_tokens: int,
    max_mask_slots: int | None,
    max_seq_len: int | None,
    backend: str,
    threads: int,
    require_signature: Path | None,
    plot: Path | None,
    trust_remote_code: bool,
    as_json: bool,
) -> None:
    """Measure the accuracy of each mask slot and the tokens per step that follow from it.

    Measures along the answers in DATA (JSONL, in the format of `spaceport tune`) and along answers that the model
    generates for the same prompts. A checkpoint runs in PyTorch, a bundle on its backend.
    """
    check_options(limit, max_tokens, plot)
    plotting = (
        import_module("spaceport.tools.verify.acceptance.plot") if plot is not None else None
    )  # raises at once if matplotlib is missing
    with stages() as stage:
        stage("reading the conversations")
        conversations = read_conversations(data)[:limit]
        stage("opening the model")
        with open_source(
            model, backend, max_seq_len, threads, trust_remote_code, adapter, require_signature
        ) as runtime:
            slots = slots_of(runtime, max_mask_slots)
            check_lengths(runtime, max_tokens)
            samples, counts = samples_of(runtime, conversations, data)
            found = measure(runtime, announced(samples, stage), max_tokens, slots)
    if as_json:
        show_json({"samples": len(samples), "max_tokens": max_tokens, "counts": counts, **found.as_dict()})
    else:
        show(found, samples, counts)
    if plotting is not None:
        plotting.draw(found, plot, f"{model.absolute().name}, {len(samples)} samples")


def check_options(limit: int | None, max_tokens: int, plot: Path | None) -> None:
    """Raise for invalid options before any file is opened."""
    if limit is not None and limit < 1:
        raise OptionFault(f"--limit is {limit}: expected at least 1")
    if max_tokens < 1:
        raise OptionFault(f"--max-tokens is {max_tokens}: expected at least 1")
    if plot is None:
        return
    if plot.suffix.lower() not in _PLOTS:
        raise OptionFault(f"--plot is {plot}: expected a file name that ends in {' or '.join(_PLOTS)}")
    if not plot.absolute().parent.is_dir() or plot.is_dir():
        raise OptionFault(f"--plot is {plot}: expected a file name in an existing folder")


def slots_of(runtime: Runtime, asked: int | None) -> int:
    """The number of mask slots to measure."""
    most = runtime.bundle.manifest.max_draft_tokens
    if asked is not None and not 1 <= asked <= most:
        raise OptionFault(f"--max-mask-slots is {asked}: expected 1 to {most}, the mask slots or heads of the model")
    return asked or most


def check_lengths(runtime: Runtime, max_tokens: int) -> None:
    """Raise if an answer of --max-tokens fills the whole context."""
    if max_tokens >= runtime.max_seq_len:
        raise OptionFault(
            f"--max-tokens is {max_tokens}, which leaves no tokens for the prompt in a context of {runtime.max_seq_len}: lower "
            f"it, or raise --max-seq-len (at most {runtime.bundle.manifest.max_positions})"
        )


def samples_of(
    runtime: Runtime, conversations: Sequence[Conversation], data: Path
) -> tuple[list[ReferenceAnswer], dict[str, int]]:
    """The reference answers that fit into the context, and how many were used, truncated and dropped."""
    prepared = prepare(conversations, conversation_encoder_for(runtime), runtime.max_seq_len)
    counts = {name: count for name, count in prepared.counts.items() if count}
    samples = reference_answers(prepared, conversations, runtime.bundle.manifest.tokens)
    if not samples:
        raise InputFault(
            f"{data}: no answer of its {len(conversations)} conversations can be measured ({described(counts)}): "
            f"expected answers that begin before token {runtime.max_seq_len}"
        )
    return samples, counts


def announced(samples: Sequence[ReferenceAnswer], stage: Callable[[str], None]) -> Iterator[ReferenceAnswer]:
    """The samples, with about ten progress lines on stderr."""
    every = max(1, -(-len(samples) // 10))
    for number, sample in enumerate(samples):
        if number % every == 0:
            stage(f"measuring sample {number + 1} of {len(samples)}")
        yield sample


def show(found: Acceptance, samples: Sequence[ReferenceAnswer], counts: dict[str, int]) -> None:
    """Print the accuracy of each mask slot and the tokens per step with that many mask slots."""
    generated, reference = found.generated, found.reference
    rows: list[Sequence[object]] = [
        (
            f"{found.predictor} {slot}" if slot else "next token",
            share(generated.accuracy[slot]),
            share(reference.accuracy[slot]),
            generated.tokens_per_step[slot],
            reference.tokens_per_step[slot],
        )
        for slot in range(1 + reference.mask_slots)
    ]
    columns = (
        "predicted by",
        "accuracy, generated",
        "accuracy, reference",
        "tokens per step, generated",
        "tokens per step, reference",
    )
    title = (
        f"{len(samples)} samples ({described(counts)}), {generated.tokens} generated tokens, "
        f"{reference.tokens} reference tokens"
    )
    show_table(title, columns, rows)
    click.echo(
        "accuracy: predictions that equal the token at their position. tokens per step: with a chain of this many mask slots\n"
        "(end tokens not counted). generated: along greedy answers of the model. reference: along the answers in DATA."
    )
    if found.forks is not None:
        show_forks(found.forks)


def show_forks(forks: ForkTally) -> None:
    """Print precision and recall of fork predictions."""
    click.echo(
        f"fork tokens at {forks.positions} positions of reference root threads: {forks.expected} expected, "
        f"{forks.predicted} predicted, {forks.correct} correct (precision {share(forks.precision)}, "
        f"recall {share(forks.recall)})"
    )


def share(value: float | None) -> str:
    """A fraction as a percentage."""
    return "-" if value is None else f"{100 * value:.1f} %"


def described(counts: dict[str, int]) -> str:
    """Counts with their names."""
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"
