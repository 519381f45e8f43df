"""`spaceport acceptance`: how many of its own drafts a model would accept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path

import click

from spaceport.graphs.contract.faults import InputFault, OptionFault
from spaceport.runtime.session import Runtime
from spaceport.tools.cli.options import PATH, json_option, remote_code_option, threads_option
from spaceport.tools.terminal.screen import show_json, show_table, stages
from spaceport.tools.tune.conversations import Conversation, read_conversations
from spaceport.tools.tune.samples import prepare
from spaceport.tools.verify.acceptance.measure import Acceptance, measure
from spaceport.tools.verify.acceptance.reference_answers import ReferenceAnswer, reference_answers
from spaceport.tools.verify.acceptance.source import conversation_encoder_for, open_source
from spaceport.tools.verify.acceptance.tally import ForkTally

_PLOTS = (".svg", ".png")


@click.command("acceptance")
@click.argument("model", metavar="CHECKPOINT|BUNDLE", type=PATH)
@click.argument("data", type=PATH)
@click.option("--limit", type=int, metavar="N", help="Read only the first N conversations of DATA.")
@click.option("--max-tokens", default=256, show_default=True, metavar="N", help="Most tokens of an own answer.")
@click.option("--max-mask-slots", type=int, metavar="K", help="Mask slots to measure; by default all that it has.")
@click.option("--max-seq-len", type=int, metavar="N", help="Longest prompt and answer; longer ones are cut.")
@click.option("--backend", type=click.Choice(("auto", "onnxruntime")), default="auto", show_default=True)
@threads_option
@click.option("--plot", type=PATH, metavar="FILE", help="Draw it, as .svg or .png.")
@remote_code_option
@json_option("the numbers")
def command(
    model: Path,
    data: Path,
    limit: int | None,
    max_tokens: int,
    max_mask_slots: int | None,
    max_seq_len: int | None,
    backend: str,
    threads: int,
    plot: Path | None,
    trust_remote_code: bool,
    as_json: bool,
) -> None:
    """Measure how often each mask slot is right, and how many tokens a step writes.

    Along the answers in DATA (JSONL, as `spaceport tune` reads it), and along those that the model writes itself on the
    same prompts. A checkpoint runs in PyTorch, a bundle on its backend; the numbers mean the same.
    """
    check_options(limit, max_tokens, plot)
    plotting = (
        import_module("spaceport.tools.verify.acceptance.plot") if plot is not None else None
    )  # lacking: told at once
    with stages() as stage:
        stage("reading the conversations")
        conversations = read_conversations(data)[:limit]
        stage("opening the model")
        with open_source(model, backend, max_seq_len, threads, trust_remote_code) as runtime:
            slots = slots_of(runtime, max_mask_slots)
            check_room(runtime, max_tokens)
            samples, counts = samples_of(runtime, conversations, data)
            found = measure(runtime, announced(samples, stage), max_tokens, slots)
    if as_json:
        show_json({"samples": len(samples), "max_tokens": max_tokens, "counts": counts, **found.as_dict()})
    else:
        show(found, samples, counts)
    if plotting is not None:
        plotting.draw(found, plot, f"{model.absolute().name}, {len(samples)} samples")


def check_options(limit: int | None, max_tokens: int, plot: Path | None) -> None:
    """Raise for what can be told wrong before any file is opened."""
    if limit is not None and limit < 1:
        raise OptionFault(f"--limit is {limit}: expected at least 1")
    if max_tokens < 1:
        raise OptionFault(f"--max-tokens is {max_tokens}: expected at least 1")
    if plot is None:
        return
    if plot.suffix.lower() not in _PLOTS:
        raise OptionFault(f"--plot is {plot}: expected a name that ends in {' or '.join(_PLOTS)}")
    if not plot.absolute().parent.is_dir() or plot.is_dir():
        raise OptionFault(f"--plot is {plot}: expected the name of a file in a folder that is there")


def slots_of(runtime: Runtime, asked: int | None) -> int:
    """How many mask slots are measured."""
    most = runtime.bundle.manifest.max_mask_slots
    if asked is not None and not 1 <= asked <= most:
        raise OptionFault(f"--max-mask-slots is {asked}: expected 1 to {most}, those that the model has")
    return asked or most


def check_room(runtime: Runtime, max_tokens: int) -> None:
    """Raise for answers that no prompt leaves room for."""
    if max_tokens >= runtime.max_seq_len:
        raise OptionFault(
            f"--max-tokens is {max_tokens}, the longest text is {runtime.max_seq_len}: lower it to leave room for prompts, or "
            f"raise --max-seq-len (the model goes up to {runtime.bundle.manifest.max_positions})"
        )


def samples_of(
    runtime: Runtime, conversations: Sequence[Conversation], data: Path
) -> tuple[list[ReferenceAnswer], dict[str, int]]:
    """The given answers that fit, and what was counted on the way."""
    prepared = prepare(conversations, conversation_encoder_for(runtime), runtime.max_seq_len)
    counts = {name: count for name, count in prepared.counts.items() if count}
    samples = reference_answers(prepared, conversations, runtime.bundle.manifest.tokens)
    if not samples:
        raise InputFault(
            f"{data}: no answer of its {len(conversations)} conversations can be measured ({told(counts)}): expected "
            f"answers that begin before {runtime.max_seq_len} tokens"
        )
    return samples, counts


def announced(samples: Sequence[ReferenceAnswer], stage: Callable[[str], None]) -> Iterator[ReferenceAnswer]:
    """The samples; on stderr how many are done, about ten times."""
    every = max(1, -(-len(samples) // 10))
    for number, sample in enumerate(samples):
        if number % every == 0:
            stage(f"measuring sample {number + 1} of {len(samples)}")
        yield sample


def show(found: Acceptance, samples: Sequence[ReferenceAnswer], counts: dict[str, int]) -> None:
    """One table for people: what each mask slot is right in, and what as many of them bring."""
    own, given = found.generated, found.reference
    rows: list[Sequence[object]] = [
        (
            f"mask slot {slot}" if slot else "next token",
            share(own.accuracy[slot]),
            share(given.accuracy[slot]),
            own.tokens_per_step[slot],
            given.tokens_per_step[slot],
        )
        for slot in range(1 + given.mask_slots)
    ]
    columns = ("", "right, own", "right, given", "tokens a step, own", "tokens a step, given")
    title = f"samples: {len(samples)} ({told(counts)}); tokens: {own.tokens} own, {given.tokens} given"
    show_table(title, columns, rows)
    click.echo("Tokens a step: decoding with as many mask slots as the row says; what ends a text counts as none.")
    if found.forks is not None:
        show_forks(found.forks)


def show_forks(forks: ForkTally) -> None:
    """What became of the forks, in one line."""
    click.echo(
        f"[Fork] at {forks.positions} places of given spines: {forks.expected} in the trees, {forks.predicted} predicted, "
        f"{forks.correct} of them right (precision {share(forks.precision)}, recall {share(forks.recall)})"
    )


def share(value: float | None) -> str:
    """A part of a whole as people read it."""
    return "-" if value is None else f"{100 * value:.1f} %"


def told(counts: dict[str, int]) -> str:
    """Counts in words."""
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "nothing counted"
