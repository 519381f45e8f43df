"""The format of a bundle: the one that is asked for, or the best one for a model and the machine that will run it."""

from __future__ import annotations

from math import prod
from typing import Literal, NamedTuple

from transformers import PreTrainedModel

from spaceport.exporter.checkpoint import model_config, model_without_values
from spaceport.exporter.checkpoint_files import ModelFiles
from spaceport.exporter.gguf_file import GgufFile
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


class ChosenFormat(NamedTuple):
    """The format of a bundle."""

    format: Format
    reason: str  # why this one, in one line
    measurable: bool = False  # whether int4 is measured quickly, which decides better than the size of the model


def choose_format(files: ModelFiles, wanted: str | None, machine: Machine, remote_code: bool = False) -> ChosenFormat:
    """The format of a checkpoint's bundle; the checkpoint's weights are not read."""
    if wanted is not None:
        named = _named(wanted, files)
        return ChosenFormat(named, f"format {named.name}: {named.purpose}")
    if machine == "gpu":
        return _with_reason("float16", "for a GPU; formats with smaller weights are for TensorRT (--format)")
    bare = model_without_values(model_config(files, remote_code), "float32")
    if (why := why_not_native(bare)) is not None:
        return _with_reason("float32", f"{why}; --format float16 is for GPUs")
    if files.gguf is not None and _exact_share(files.gguf) >= _LEAST_EXACT:
        return _with_reason(
            "stored", "the weights of the GGUF file as they are; --format int4 or int8 rounds them again"
        )
    return _by_size(sum(weight.numel() for weight in bare.parameters()))


def why_not_native(model: PreTrainedModel) -> str | None:
    """Why native operators cannot compute a model as a whole, which may be without values; None if they can."""
    try:
        require_known_parts(model, probe(model))
    except InputFault as reason:
        return str(reason)
    return None


def _by_size(total: int) -> ChosenFormat:
    """The native format for a model with this number of weights, of which none is read."""
    size = f"{total / 1e6:,.1f} million weights"
    if total < _SMALL:
        return _with_reason(
            "float32", f"fewer bits gain nothing in a model of {size}; --format int8 uses them nevertheless"
        )
    if total < _LARGE:
        chosen = _with_reason("int8", f"a model of {size} loses too much in int4; --format float32 loses nothing")
    else:
        chosen = _with_reason("int4", f"{size}; --format int8 is closer to float32, and slower")
    return chosen._replace(measurable=total in MEASURED)


def _named(name: str, files: ModelFiles) -> Format:
    if name not in FORMATS:
        raise OptionFault(f"format is {name!r}: expected {', '.join(FORMATS)}")
    if name != "stored":
        return FORMATS[name]
    other = "expected another format (--format int8)"
    if files.gguf is None:
        raise OptionFault(f"format is stored, which keeps the weights of a GGUF file: {files.path} is none; {other}")
    if not _exact_share(files.gguf):
        raise OptionFault(
            f"format is stored: {files.path} has no matrix in a type that native operators have ({', '.join(GGUF_BLOCKS)}); "
            f"{other}"
        )
    return FORMATS["stored"]


def _with_reason(name: str, reason: str) -> ChosenFormat:
    return ChosenFormat(FORMATS[name], f"format {name}: {reason}")


def _exact_share(file: GgufFile) -> float:
    """The share of the weights in matrices that native operators compute with exactly as a GGUF file stores them."""
    matrices = [tensor for tensor in file.tensors.values() if len(tensor.shape) > 1]
    exact = sum(prod(tensor.shape) for tensor in matrices if tensor.kind in GGUF_BLOCKS)
    return exact / max(1, sum(prod(tensor.shape) for tensor in matrices))
