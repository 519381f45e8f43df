"""`spaceport acceptance`: measure draft acceptance rates of a checkpoint or a bundle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import date
from importlib import import_module
from pathlib import Path
from typing import ClassVar

import click

from spaceport.exporter.sar_config import SAR_FILE, save_acceptance
from spaceport.graphs.contract.faults import InputFault, OptionFault
from spaceport.runtime.session import Runtime
from spaceport.tools.cli.options import (
    PATH,
    BeforeLast,
    Sectioned,
    adapter_option,
    json_option,
    remote_code_option,
    threads_option,
)
from spaceport.tools.terminal.screen import show_json, show_table, stages
from spaceport.tools.tune.conversations import Conversation, read_conversations
from spaceport.tools.tune.samples import prepare
from spaceport.tools.verify.acceptance import (
    ForkTally,
    ModelAcceptance,
    ModelSource,
    SourceOptions,
    conversation_encoder_for,
    count_drafted,
    find_source,
    measure,
    require_storage,
)
from spaceport.tools.verify.answers import ReferenceAnswer, reference_answers

_PLOTS = (".svg", ".png")
_DEPTHS = 8  # columns of several models; --json has all


class AcceptanceCommand(Sectioned):
    """The command with its options in groups."""

    headings: ClassVar = {"limit": "Samples", "backend": "Backend", "plot": "Output"}


@click.command("acceptance", cls=AcceptanceCommand)
@click.argument("models", cls=BeforeLast, metavar="CHECKPOINT|BUNDLE...", nargs=-1, required=True, type=PATH)
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
    help="Maximum number of mask slots or heads to measure; default: those of each model.",
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
@remote_code_option
@click.option("--plot", type=PATH, metavar="FILE", help="Write a plot as .svg or .png.")
@click.option(
    "--save",
    is_flag=True,
    help="Store the rates along generated answers in sar_config.json of the checkpoint or adapter.",
)
@json_option("the numbers")
def command(
    models: tuple[Path, ...],
    data: Path,
    adapter: Path | None,
    limit: int | None,
    max_tokens: int,
    max_mask_slots: int | None,
    max_seq_len: int | None,
    backend: str,
    threads: int,
    plot: Path | None,
    save: bool,
    trust_remote_code: bool,
    as_json: bool,
) -> None:
    """Measure the accuracy of each mask slot and the tokens per step that follow from it.

    Measures along the answers in DATA (JSONL, in the format of `spaceport tune`) and along answers that the model
    generates for the same prompts. A checkpoint runs in PyTorch, a bundle on its backend. Several models are compared in
    one table, with prompt lookup.
    """
    check_options(limit, max_tokens, max_mask_slots, plot)
    if len(models) > 1:
        refuse_for_several(adapter, plot, save)
    plotting = (
        import_module("spaceport.tools.verify.plot") if plot is not None else None
    )  # raises at once if matplotlib is missing
    options = SourceOptions(backend, max_seq_len, threads, trust_remote_code, adapter)
    storage = require_storage(models[0], options) if save else None
    with stages() as stage:
        stage("reading the conversations")
        conversations = read_conversations(data)[:limit]
        stage("reading the models' configurations")
        sources = [find_source(model, options) for model in models]
        for source in sources:
            check_lengths(source.max_seq_len, max_tokens)
        if len(sources) == 1:
            sources[0].require_drafts()
            require_slots(sources[0], max_mask_slots)
        measured = [
            measured_model(source, conversations, data, max_tokens, max_mask_slots, len(sources) > 1, stage)
            for source in sources
        ]
    if len(measured) > 1:
        if as_json:
            show_json(
                {"max_tokens": max_tokens, "models": [{"model": model.model, **model.as_dict()} for model in measured]}
            )
        else:
            show_models(measured)
        return
    (model,) = measured
    if storage is not None:
        save_rates(model, storage, data)
    if as_json:
        show_json({"max_tokens": max_tokens, **model.as_dict()})
    else:
        show(model)
    if plotting is not None:
        plotting.draw(model.measured, plot, f"{models[0].absolute().name}, {model.samples} samples")


def check_options(limit: int | None, max_tokens: int, max_mask_slots: int | None, plot: Path | None) -> None:
    """Raise for invalid options before any file is opened."""
    for name, value in (("--limit", limit), ("--max-tokens", max_tokens), ("--max-mask-slots", max_mask_slots)):
        if value is not None and value < 1:
            raise OptionFault(f"{name} is {value}: expected at least 1")
    if plot is None:
        return
    if plot.suffix.lower() not in _PLOTS:
        raise OptionFault(f"--plot is {plot}: expected a file name that ends in {' or '.join(_PLOTS)}")
    if not plot.absolute().parent.is_dir() or plot.is_dir():
        raise OptionFault(f"--plot is {plot}: expected a file name in an existing folder")


def refuse_for_several(adapter: Path | None, plot: Path | None, save: bool) -> None:
    """Raise for options that are for one model only."""
    for name, is_set, advice in (
        ("--adapter", adapter is not None, "export its base model with it, and give the bundle"),
        ("--plot", plot is not None, "plot one model at a time"),
        ("--save", save, "measure one model at a time"),
    ):
        if is_set:
            raise OptionFault(f"{name} with several models: expected one CHECKPOINT with it; {advice}")


def save_rates(model: ModelAcceptance, storage: Path, data: Path) -> None:
    """Store the measured rates in the sar_config.json of a checkpoint or adapter folder."""
    if not model.measured.generated.tokens:
        raise InputFault(
            f"{data}: the model generates no token for its prompts: nothing is stored; expected other prompts"
        )
    save_acceptance(storage, model.measured.as_draft_acceptance(data.name, date.today()))
    click.echo(f"stored in {storage / SAR_FILE}: the next export copies the rates into its bundle", err=True)


def require_slots(source: ModelSource, requested: int | None) -> None:
    """Raise if a model has fewer mask slots or heads than are requested."""
    if requested is not None and requested > source.draft_tokens:
        raise OptionFault(
            f"--max-mask-slots is {requested}: expected 1 to {source.draft_tokens}, the mask slots or heads of the model"
        )


def measured_model(
    source: ModelSource,
    conversations: Sequence[Conversation],
    data: Path,
    max_tokens: int,
    max_mask_slots: int | None,
    lookup: bool,
    stage: Callable[[str], None],
) -> ModelAcceptance:
    """The acceptance of a model, with the steps of prompt lookup if they are wanted."""
    stage(f"opening {source.path}")
    with source.open() as runtime:
        check_lengths(runtime.max_seq_len, max_tokens)
        samples, counts = samples_of(runtime, conversations, data)
        slots = min(max_mask_slots or source.draft_tokens, source.draft_tokens)
        drafts = measure(runtime, announced(samples, stage), max_tokens, slots)
        steps = {}
        if lookup:
            stage("generating with prompt lookup")
            steps = count_drafted(runtime, samples, max_tokens, slots)
        manifest = runtime.bundle.manifest
    origin = (manifest.drafts.name, manifest.drafts.adapter)
    return ModelAcceptance(str(source.path), *origin, len(samples), counts, drafts, steps)


def check_lengths(max_seq_len: int | None, max_tokens: int) -> None:
    """Raise if an answer of --max-tokens fills the whole context, as far as its length is known."""
    if max_seq_len is not None and max_tokens >= max_seq_len:
        raise OptionFault(
            f"--max-tokens is {max_tokens}, which leaves no tokens for the prompt in a context of {max_seq_len}: lower it, or "
            "raise --max-seq-len if the model allows it"
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


def show(model: ModelAcceptance) -> None:
    """Print the accuracy of each mask slot and the tokens per step with that many mask slots."""
    drafts = model.measured
    generated, reference = drafts.generated, drafts.reference
    rows: list[Sequence[object]] = [
        (
            f"{drafts.predictor} {slot}" if slot else "next token",
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
        f"{model.samples} samples ({described(model.counts)}), {generated.tokens} generated tokens, "
        f"{reference.tokens} reference tokens"
    )
    show_table(title, columns, rows)
    click.echo(
        "accuracy: predictions that equal the token at their position. tokens per step: with a chain of this many mask slots\n"
        "(end tokens not counted). generated: along greedy answers of the model. reference: along the answers in DATA."
    )
    if drafts.forks is not None:
        show_forks(drafts.forks)


def show_forks(forks: ForkTally) -> None:
    """Print precision and recall of fork predictions."""
    click.echo(
        f"fork tokens at {forks.positions} positions of reference root threads: {forks.expected} expected, "
        f"{forks.predicted} predicted, {forks.correct} correct (precision {share(forks.precision)}, "
        f"recall {share(forks.recall)})"
    )


def described(counts: dict[str, int]) -> str:
    """Counts with their names."""
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"


def show_models(models: Sequence[ModelAcceptance]) -> None:
    """Print tokens per step and acceptance by depth, on the answers that each model generates."""
    depths = min(_DEPTHS, max(model.draft_tokens for model in models))
    by_depth = [f"depth {depth}" for depth in range(1, 1 + depths)]
    columns = ("model", "method", "drafts", "exact", "own", "lookup", "together", *by_depth)
    rows = []
    for model in models:
        rates = [*model.measured.generated.acceptance, *[None] * depths][:depths]
        per_step = (model.own_tokens_per_step, *(counts.tokens_per_step for counts in model.steps.values()))
        rows.append((model.model, model.method, model.drafts, share(model.exact), *per_step, *map(share, rates)))
    show_table("Tokens per step, and acceptance by depth", columns, rows)
    click.echo(
        "exact: tokens of the drafted answers that plain decoding selects. own: tokens per step with chains of mask slots or\n"
        "heads. lookup: with prompt lookup only. together: with trees of both. depth: draft tokens of the chains that are\n"
        "accepted."
    )


def share(value: float | None) -> str:
    """A fraction as a percentage."""
    return "-" if value is None else f"{100 * value:.1f} %"
