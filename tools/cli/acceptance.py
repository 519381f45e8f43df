"""`spaceport acceptance`: measure draft acceptance rates of a checkpoint or a bundle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import click

from spaceport.exporter.checkpoint_files import SAR_FILE, save_acceptance
from spaceport.graphs.contract.draft_methods import PREDICTOR_NAMES, drafts_in_words, measured_acceptance
from spaceport.graphs.contract.faults import InputFault, OptionFault
from spaceport.tools.cli.options import (
    PATH,
    BeforeLast,
    Sectioned,
    adapter_option,
    backend_option,
    declared_options,
    json_option,
    max_seq_len_option,
    remote_code_option,
    sections,
    threads_option,
)
from spaceport.tools.terminal.screen import show_json, show_table, stages
from spaceport.training.acceptance import (
    AcceptanceOptions,
    DraftPrompt,
    MeasuredDrafts,
    ModelSource,
    draft_prompts,
    find_source,
    is_checkpoint,
    measure,
)
from spaceport.verify.prompts import read_prompts

_DEPTHS = 8  # columns; --json has all
_SHOWN = 10  # progress lines, about


@sections({"limit": "Answers", "backend": "Backend", "save": "Output"})
@click.command("acceptance", cls=Sectioned)
@click.argument("models", cls=BeforeLast, metavar="CHECKPOINT|BUNDLE...", nargs=-1, required=True, type=PATH)
@click.argument("data", type=PATH)
@adapter_option
@declared_options(AcceptanceOptions, defaults=True)
@max_seq_len_option
@backend_option
@threads_option
@remote_code_option
@click.option("--save", is_flag=True, help="Store the rates in sar_config.json of the checkpoint or adapter.")
@json_option("the numbers")
def command(models: tuple[Path, ...], data: Path, save: bool, as_json: bool, **given: Any) -> None:
    """Measure which share of the draft tokens of mask slots or heads is accepted, by depth, and the tokens per step.

    The drafts are those of the model's own answers. DATA has one prompt per line: plain text, or JSON with
    "messages", "prompt" or "text", as `spaceport tune` reads; a line may have a "kind", and each kind has a row of its
    own. A checkpoint runs in PyTorch, a bundle on its backend. Several models are compared in one table.
    """
    options = AcceptanceOptions(**given)
    if len(models) > 1 and (options.adapter is not None or save):
        name = "--save" if save else "--adapter"
        raise OptionFault(f"{name} with several models: expected one CHECKPOINT with it; measure one model at a time")
    temperature = options.temperature
    if save and temperature:
        raise OptionFault(
            f"--save with --temperature {temperature:g}: expected greedy answers: leave --temperature out"
        )
    storage = _storage(models[0], options.adapter) if save else None
    found: list[tuple[ModelSource, MeasuredDrafts]] = []
    with stages() as stage:
        prompts = read_prompts(data)[: options.limit]
        stage("reading the models' configurations")
        for source in [find_source(model, options) for model in models]:
            stage(f"opening {source.path}")
            with source.open() as runtime:
                announced = _announced(draft_prompts(runtime, prompts, data), stage)
                found.append((source, measure(runtime, announced, options.max_tokens, temperature)))
    if storage is not None:
        _save(found[0][1], storage, data)
    if as_json:
        measured = [_as_dict(*model) for model in found]
        show_json({"max_tokens": options.max_tokens, "temperature": temperature, "models": measured})
    else:
        _show(found, temperature)


def _storage(model: Path, adapter: Path | None) -> Path:
    """The folder whose sar_config.json stores acceptance rates; raises for a bundle and for a GGUF file."""
    if adapter is not None:
        return adapter
    if not is_checkpoint(model) or not model.is_dir():
        raise OptionFault(
            f"--save with {model}: expected a checkpoint folder, or --adapter with an adapter folder, which stores the "
            "rates; the digests of a bundle forbid changes: export the checkpoint again after --save"
        )
    return model


def _announced(prompts: Sequence[DraftPrompt], stage: Callable[[str], None]) -> Iterator[DraftPrompt]:
    """The prompts, with about ten progress lines on stderr."""
    every = max(1, -(-len(prompts) // _SHOWN))
    for number, prompt in enumerate(prompts):
        if number % every == 0:
            stage(f"measuring prompt {number + 1} of {len(prompts)}")
        yield prompt


def _save(measured: MeasuredDrafts, storage: Path, data: Path) -> None:
    if not measured.all.tokens:
        raise InputFault(
            f"{data}: the model generates no token for its prompts: nothing is stored; expected other prompts"
        )
    tally = measured.all
    rates = measured_acceptance(tally.acceptance, tally.tokens, data.name, date.today(), measured.lookup.rates)
    save_acceptance(storage, rates)
    click.echo(f"stored in {storage / SAR_FILE}: the next export copies the rates into its bundle", err=True)


def _as_dict(source: ModelSource, measured: MeasuredDrafts) -> dict[str, Any]:
    drafts = source.drafts
    named = {"model": str(source.path), "method": drafts.name, "adapter": drafts.adapter}
    return {**named, "predictor": drafts.predictor, "draft_tokens": drafts.max_tokens, **measured.as_dict()}


def _show(found: Sequence[tuple[ModelSource, MeasuredDrafts]], temperature: float) -> None:
    """Print a row for each model and kind of prompt."""
    depths = min(_DEPTHS, max(len(measured.all.drafted) for _, measured in found))
    rows: list[Sequence[object]] = []
    for source, measured in found:
        drafts = drafts_in_words(source.drafts.max_tokens, PREDICTOR_NAMES[source.drafts.predictor])
        for kind, tally in {"all": measured.all, **measured.kinds}.items():
            shares = [*tally.acceptance, *[None] * depths][:depths]
            percent = ["-" if share is None else f"{100 * share:.1f} %" for share in shares]
            own = (str(source.path), source.drafts.name, drafts) if kind == "all" else ("", "", "")
            rows.append((*own, kind, tally.answers, tally.tokens, tally.tokens_per_step, *percent))
    columns = ("model", "method", "drafts", "kind", "answers", "tokens", "per step")
    by_depth = [f"depth {depth}" for depth in range(1, 1 + depths)]
    answers = f"answers at temperature {temperature:g}" if temperature else "greedy answers"
    show_table(f"Draft tokens that are accepted, along the model's own {answers}", (*columns, *by_depth), rows)
