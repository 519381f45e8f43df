"""Tuned checkpoint: a tuned model as a checkpoint folder, or its adapter alone, with its model card."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from spaceport import __version__
from spaceport.exporter.checkpoint_files import read_json, write_sar_config
from spaceport.exporter.draft_files import narrowed, write_adapter_folder, write_mechanisms
from spaceport.graphs.contract.draft_methods import CAUSAL
from spaceport.graphs.gated import adapter_state, base_state
from spaceport.graphs.mechanism import Mechanism
from spaceport.training.methods import MergedModel
from spaceport.training.packing import TrainingBatches
from spaceport.training.settings import TuningJob, TuningOutcome
from spaceport.training.tunable_model import TunableModel, id_of

_GENERATION_FILE = "generation_config.json"


def write_checkpoint(
    folder: Path, tunable: TunableModel, tuned: MergedModel, state: Mapping[str, Tensor] | None
) -> None:
    """Write model, tokenizer and sar_config.json; `state` holds the gathered weights of a sharded model.

    Weights that exceed the range of the checkpoint's type are written in float32.
    """
    model = tuned.model
    dtype = _wide_enough((model.state_dict() if state is None else state).values(), tunable.dtype)
    generation = model.generation_config
    # The checkpoint's own file is copied instead: save_pretrained validates it by rules that may be newer than the file.
    model.generation_config = GenerationConfig(eos_token_id=list(tunable.tokens.end))
    model.to(dtype)  # type: ignore[arg-type]
    if tuned.adapter is not None:
        state = base_state(model)
    model.save_pretrained(folder, state_dict=None if state is None else _cast(state, dtype))
    model.generation_config = generation
    tunable.tokenizer.save_pretrained(folder)
    _copy_generation(tunable.checkpoint.folder / _GENERATION_FILE, folder / _GENERATION_FILE, tunable.tokens.end)
    for file in folder.glob("*.safetensors"):
        file.chmod(0o644)  # safetensors creates files that only the owner can read
    write_sar_config(folder, _sar_config(tunable, tuned))
    write_mechanisms(folder, _mechanisms(tuned, adapter_state(model)))


def _mechanisms(tuned: MergedModel, adapter_tensors: Mapping[str, Tensor]) -> list[Mechanism]:
    """With what a tuned model drafts."""
    adapter = None if tuned.adapter is None else replace(tuned.adapter, tensors=adapter_tensors)
    mechanisms = (adapter, tuned.correction, tuned.input_rows, tuned.phrases)
    return [mechanism for mechanism in mechanisms if mechanism is not None]


def _copy_generation(own: Path, target: Path, end: tuple[int, ...]) -> None:
    """Copy a checkpoint's generation_config.json, with all tokens that end its answers: a converted one has more."""
    if not own.exists():
        return
    content = read_json(own)
    named = content.get("eos_token_id")
    if named is None or set(named if isinstance(named, list) else [named]) == set(end):
        shutil.copyfile(own, target)
    else:
        target.write_text(json.dumps({**content, "eos_token_id": list(end)}, indent=2) + "\n", "utf-8")


def write_adapter_only(folder: Path, tunable: TunableModel, tuned: MergedModel) -> None:
    """Write a gated adapter and the embeddings of the special tokens as an adapter folder, without base weights."""
    assert tunable.base is not None, "the method is gated-lora"
    write_adapter_folder(
        folder,
        tunable.base,
        tuned.model,
        {name: id_of(tunable.tokenizer, name) for name in tunable.names.all},
        _mechanisms(tuned, narrowed(adapter_state(tuned.model))),
        _sar_config(tunable, tuned),
    )


def _sar_config(tunable: TunableModel, tuned: MergedModel) -> dict[str, Any]:
    """The special tokens of the tuned model, as entries of sar_config.json."""
    entries: dict[str, Any] = {
        "mask_tokens": list(tunable.names.masks),
        "mask_slots": tunable.mask_slots or None,
        "fork_token": tunable.names.fork,
        "child_token": tunable.names.child,
        "method": "tune",
    }
    if tunable.mask_layout != CAUSAL:
        entries |= asdict(tunable.mask_layout)
    # The base model's output must not change unless a request asks for forks.
    return entries if tuned.adapter is None or tunable.names.fork is None else {**entries, "fork_by_default": False}


def _wide_enough(weights: Iterable[Tensor], dtype: torch.dtype) -> torch.dtype:
    """The checkpoint's type, or float32 if a weight exceeds its range (float16 ends at 65,504)."""
    most = torch.finfo(dtype).max
    found = (float(tensor.abs().max()) for tensor in weights if tensor.is_floating_point() and tensor.numel())
    return dtype if all(largest <= most for largest in found) else torch.float32


def _cast(state: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights cast to another type; tied weights stay tied, so that they are written once."""
    made: dict[tuple[int, torch.Size], Tensor] = {}
    return {
        name: made.setdefault((tensor.data_ptr(), tensor.shape), tensor.to(dtype)) for name, tensor in state.items()
    }


CARD_FILE = "README.md"
_PACKAGES = ("torch", "transformers", "accelerate", "peft", "tokenizers")


def write_card(folder: Path, job: TuningJob, batches: TrainingBatches, outcome: TuningOutcome) -> None:
    """Write the model card to a checkpoint folder."""
    settings = outcome.settings
    drafting, forking = f"to draft {settings.slots} tokens ahead with mask slots", "to fork into parallel threads"
    learned = " and ".join([drafting] * settings.drafts + [forking] * settings.forks)
    last = {line["kind"]: line for line in outcome.measurements}
    title = f"{job.checkpoint.name}, tuned with spaceport"
    usage = f"This model was trained {learned}. Export it with `spaceport export`"
    if job.adapter_only:
        title = f"Adapter for {job.checkpoint.name}, trained with spaceport"
        usage = (
            f"This adapter was trained {learned}; it needs its base model. Export both with "
            f"`spaceport export {job.checkpoint.name} BUNDLE --adapter {job.target.name}`"
        )
    slots = (f"mask slot {slot}" for slot in range(1, settings.slots + 1))
    parts = [
        f"# {title}",
        f"{usage} and measure its draft acceptance with `spaceport acceptance`.",
        "## Results",
        _table(("", "next token", *slots), _results(last)),
        "Loss is the mean cross entropy; accuracy is the fraction of targets that are the most probable token, given the true text.",
        "## Data",
        _table(("file",), [(path.name,) for path in job.data]),
        _table(("samples", "count"), [(name, count) for name, count in outcome.counts.items() if count]),
        "## Training",
        _table(("", ""), _training(batches, last.get("training", {}))),
        "## Settings",
        _table(("setting", "value"), list(settings.as_dict().items())),
        "## Versions",
        _table(("package", "version"), [("spaceport", __version__), *((name, version(name)) for name in _PACKAGES)]),
    ]
    (folder / CARD_FILE).write_text("\n\n".join(parts) + "\n", "utf-8")


def _results(last: dict[str, dict[str, Any]]) -> list[Sequence[object]]:
    rows: list[Sequence[object]] = []
    for kind, line in last.items():
        rows.append((f"{kind}: loss", *_shown(line["losses"], ".3f")))
        rows.append((f"{kind}: accuracy", *_shown(line["accuracies"], ".1%")))
        if line["corrected"]:
            rows.append((f"{kind}: accuracy with the draft correction", "-", *_shown(line["corrected"], ".1%")))
    return rows


def _shown(values: Iterable[float | None], form: str) -> list[str]:
    return ["-" if value is None else f"{value:{form}}" for value in values]


def _training(batches: TrainingBatches, final: dict[str, Any]) -> list[Sequence[object]]:
    steps = final.get("step", 0)  # fewer than planned if a time budget ended the training
    return [
        ("samples per epoch", batches.samples),
        ("steps", steps),
        ("epochs", f"{steps / batches.epoch_steps:.2f}"),
        ("tokens, mask slots included", f"{final.get('tokens', 0):,}"),
        ("hours", f"{final.get('seconds', 0) / 3600:.2f}"),
    ]


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)
