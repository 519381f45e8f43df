"""The format of a bundle: the one that is asked for, or the best one for a model and the machine that will run it."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Literal

from transformers import PreTrainedModel

from spaceport.exporter.checkpoint_files import is_gguf
from spaceport.exporter.checkpoint_source import model_config, model_without_values
from spaceport.exporter.gguf_file import GgufFile, read_gguf
from spaceport.graphs.contract.faults import InputFault, OptionFault
from spaceport.graphs.contract.formats import FORMATS, Format
from spaceport.graphs.find_parts import require_known_parts
from spaceport.graphs.traits import probe
from spaceport.kernels.gguf_weights import GGUF_BLOCKS

Machine = Literal["cpu", "gpu"]

# Weights of a model. Below the first, the steps of formats with fewer bits take as long as those of float32; from the
# second on, int4 is close enough: mean KL divergence 0.013 to 0.019 with 0.5 billion weights, 0.044 with 0.135 billion.
_SMALL, _LARGE = 20_000_000, 300_000_000
# Between these sizes an export measures the divergence of int4, in a fraction of a minute, and int8 replaces it above
# the largest: 0.02 nats are what weights of four bits cost usually in a model that is large enough for them.
MEASURED, LARGEST_DIVERGENCE = range(100_000_000, 600_000_000), 0.02
_LEAST_EXACT = 0.5  # of the weights of a GGUF file; the others are rounded to 8 bits


def choose_format(
    checkpoint: Path, wanted: str | None, machine: Machine, remote_code: bool = False
) -> tuple[Format, str]:
    """The format of a checkpoint's bundle, and why this one, in one line; the checkpoint's weights are not read."""
    if wanted is not None:
        chosen = _named(wanted, checkpoint)
        return chosen, f"format {chosen.name}: {chosen.purpose}"
    if machine == "gpu":
        return _with_reason("float16", "for a GPU; formats with smaller weights are for TensorRT (--format)")
    model = model_without_values(model_config(checkpoint, remote_code), "float32")
    if (why := why_not_native(model)) is not None:
        return _with_reason("float32", f"{why}; --format float16 is for GPUs")
    if is_gguf(checkpoint) and _exact_share(read_gguf(checkpoint)) >= _LEAST_EXACT:
        return _with_reason(
            "stored", "the weights of the GGUF file as they are; --format int4 or int8 rounds them again"
        )
    return _by_size(sum(weight.numel() for weight in model.parameters()))


def may_be_measured(checkpoint: Path, chosen: Format, remote_code: bool = False) -> bool:
    """Whether a measurement of int4 decides instead of the size of a model, by which this format was chosen."""
    if chosen.name not in ("int4", "int8"):
        return False
    model = model_without_values(model_config(checkpoint, remote_code), "float32")
    return sum(weight.numel() for weight in model.parameters()) in MEASURED


def why_not_native(model: PreTrainedModel) -> str | None:
    """Why native operators cannot compute a model as a whole, which may be without values; None if they can."""
    try:
        require_known_parts(model, probe(model))
    except InputFault as reason:
        return str(reason)
    return None


def _by_size(total: int) -> tuple[Format, str]:
    """The native format for a model with this number of weights, of which none is read."""
    size = f"{total / 1e6:,.1f} million weights"
    if total < _SMALL:
        return _with_reason(
            "float32", f"fewer bits gain nothing in a model of {size}; --format int8 uses them nevertheless"
        )
    if total < _LARGE:
        return _with_reason("int8", f"a model of {size} loses too much in int4; --format float32 loses nothing")
    return _with_reason("int4", f"{size}; --format int8 is closer to float32, and slower")


def _named(name: str, checkpoint: Path) -> Format:
    if name not in FORMATS:
        raise OptionFault(f"format is {name!r}: expected {', '.join(FORMATS)}")
    if name != "stored":
        return FORMATS[name]
    other = "expected another format (--format int8)"
    if not is_gguf(checkpoint):
        raise OptionFault(f"format is stored, which keeps the weights of a GGUF file: {checkpoint} is none; {other}")
    if not _exact_share(read_gguf(checkpoint)):
        raise OptionFault(
            f"format is stored: {checkpoint} has no matrix in a type that native operators have ({', '.join(GGUF_BLOCKS)}); "
            f"{other}"
        )
    return FORMATS["stored"]


def _with_reason(name: str, reason: str) -> tuple[Format, str]:
    return FORMATS[name], f"format {name}: {reason}"


def _exact_share(file: GgufFile) -> float:
    """The share of the weights in matrices that native operators compute with exactly as a GGUF file stores them."""
    matrices = [tensor for tensor in file.tensors.values() if len(tensor.shape) > 1]
    exact = sum(prod(tensor.shape) for tensor in matrices if tensor.kind in GGUF_BLOCKS)
    return exact / max(1, sum(prod(tensor.shape) for tensor in matrices))
