"""`spaceport export --dry-run`: the report of what an export would write, and what it would need to run."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.engine import DEFAULT_SEQ_LEN, PREFILL_ROWS, kv_slots
from spaceport.tools.cli.options import options
from spaceport.tools.terminal.screen import show_json, show_table, size

if TYPE_CHECKING:  # torch is imported only once the paths are valid
    from spaceport.exporter.dry_run import DryRun

_UNITS = {"": 1, "MB": 10**6, "GB": 10**9, "TB": 10**12, "MiB": 2**20, "GiB": 2**30}
_FLOAT32 = 4
DRY_RUN_ONLY = ("gpu_memory", "max_seq_len", "max_requests")


class _Bytes(click.ParamType[int]):
    """A number of bytes such as 24GB or 80GiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        parts = re.fullmatch(rf"(\d+(?:\.\d+)?)\s*({'|'.join(_UNITS)})", value, re.ASCII)
        if parts is None or not float(parts[1]):
            self.fail(f"{value!r}: expected a size above 0 such as 24GB, 80GB or 23.5GiB", param, ctx)
        return int(float(parts[1]) * _UNITS[parts[2]])


dry_run_options = options(
    click.option(
        "--dry-run",
        is_flag=True,
        help="Write nothing: report sizes and memory from the configuration; CHECKPOINT needs no weights.",
    ),
    click.option(
        "--gpu-memory", type=_Bytes(), metavar="SIZE", help="Memory of a GPU, such as 24GB, that it must fit into."
    ),
    click.option(
        "--max-seq-len", type=int, metavar="N", help="Context length; default: the model's, at most 4096 tokens."
    ),
    click.option("--max-requests", type=int, default=1, metavar="N", help="Concurrent requests (default: 1)."),
)


@dataclass(frozen=True)
class RunMemory:
    """Memory of a runtime with the bundle, in bytes."""

    max_seq_len: int
    max_requests: int
    slots: int  # KV slots per request, with those of draft rows and padding
    kv_slot: int  # of one KV slot of one request
    kv: int  # of all KV buffers
    weights: int
    cpu_weights: int  # on CPUs, where some formats are dequantized to float32 when the bundle is opened
    prefill: int  # estimate: logits and scores of a prefill chunk
    engine: int  # estimate: a TensorRT engine file, which holds the weights

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.prefill

    @property
    def cpu_total(self) -> int:
        """Like `total`, on CPUs."""
        return self.cpu_weights + self.kv + self.prefill


def run_memory(found: DryRun, max_seq_len: int | None, max_requests: int) -> RunMemory:
    """The memory of a runtime with these limits."""
    length = min(found.max_positions, DEFAULT_SEQ_LEN) if max_seq_len is None else max_seq_len
    if not 2 <= length <= found.max_positions:
        raise OptionFault(f"--max-seq-len is {length}: expected 2 to {found.max_positions}, the model's limit")
    if max_requests < 1:
        raise OptionFault(f"--max-requests is {max_requests}: expected at least 1")
    signature, weights = found.signature, found.files["model.onnx.data"]
    slots = kv_slots(signature.lowering, length)
    plain = found.options.attention_implementation == "plain"
    scores = 2 * found.heads * slots * _FLOAT32 if plain else 0  # before and after the softmax
    return RunMemory(
        length,
        max_requests,
        slots,
        signature.kv_bytes(1, 1),
        signature.kv_bytes(max_requests, slots),
        weights,
        found.parameters * _FLOAT32 if _dequantized(found) else weights,
        max_requests * PREFILL_ROWS * scores,
        weights,
    )


def _dequantized(found: DryRun) -> bool:
    """Whether ONNX Runtime's CPU backend dequantizes the weights when it opens the bundle."""
    return found.options.weights in ("int8", "float8") and found.options.activations == "float"


def report(found: DryRun, bundle: Path, run: RunMemory, gpu_memory: int | None) -> dict[str, Any]:
    """The report as JSON: sizes in bytes."""
    memory, disk = _memory(), shutil.disk_usage(bundle.absolute().parent).free
    return {
        "model_type": found.model_type,
        "model": found.model,
        "parameters": found.parameters,
        "quantized_parameters": found.quantized,
        "dtype": found.options.dtype,
        "weights": found.options.weights,
        "activations": found.options.activations,
        "lowering": found.options.lowering,
        "signature": found.signature.as_dict(),
        "max_positions": found.max_positions,
        "checked_headers": found.checked_headers,
        "files": dict(found.files),
        "export_memory": found.memory.total,
        "export_streamed": found.memory.streamed,
        "temporary_files": found.temporary,
        "machine": {"memory": memory, "free_disk": disk},
        "run": {**vars(run), "total": run.total, "cpu_total": run.cpu_total},
        "fits": {
            "export_memory": found.memory.total <= memory,
            "disk": found.bundle + found.temporary <= disk,
            **({} if gpu_memory is None else {"gpu": run.total <= gpu_memory}),
        },
    }


def show_report(
    found: DryRun,
    bundle: Path,
    run: RunMemory,
    gpu_memory: int | None,
    as_json: bool,
    published: Mapping[str, Any] | None = None,
) -> None:
    """Print the report as tables or as JSON, with what was found of published weights."""
    content = {**report(found, bundle, run, gpu_memory), "published": published}
    if as_json:
        show_json(content)
        return
    chosen = found.options
    if published is not None:
        click.echo(f"Published weights, counted below: {published['title']}; shown by {published['evidence']}")
    click.echo(
        f"{found.model} ({found.model_type}): {found.parameters:,} parameters; {chosen.dtype}, weights {chosen.weights}, "
        f"activations {chosen.activations}, {chosen.lowering}"
    )
    click.echo(
        f"The configuration can be exported{', and fits the headers of the weight files' * found.checked_headers}. "
        "The export itself also compares logits, for which it needs the weights."
    )
    machine, fits = content["machine"], content["fits"]
    estimates = [
        (f"{name} (estimate)" if name != "model.onnx.data" else name, size(found.files[name])) for name in found.files
    ]
    show_table("Bundle", ("file", "size"), [*estimates, ("in all", size(found.bundle))])
    where = f"{run.max_requests} request{'s' * (run.max_requests > 1)} of {run.max_seq_len} tokens"
    rows = [
        ("weights", size(run.weights)),
        (f"KV cache: {run.slots} slots of {size(run.kv_slot)}", size(run.kv)),
        ("prefill (estimate)", size(run.prefill)),
        ("in all", size(run.total)),
        *([("in all on a CPU: weights as float32", size(run.cpu_total))] if _dequantized(found) else []),
        ("TensorRT engine file (estimate)", size(run.engine)),
    ]
    show_table(f"Memory of a runtime with {where}", ("part", "size"), rows)
    reads = "layer by layer" if found.memory.streamed else "model in memory"
    written = "bundle and temporary files on the disk" if found.temporary else "bundle on the disk"
    needed, needed_disk = size(found.memory.total), size(found.bundle + found.temporary)
    limits = [
        (f"memory of the export, {reads} (estimate)", needed, size(machine["memory"]), _yes(fits["export_memory"])),
        (written, needed_disk, size(machine["free_disk"]), _yes(fits["disk"])),
    ]
    if gpu_memory is not None:
        limits.append(("runtime on the GPU", size(run.total), size(gpu_memory), _yes(fits["gpu"])))
    show_table("Fits", ("what", "needs", "of", "fits"), limits)


def _memory() -> int:
    """Physical memory of this machine, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _yes(fits: bool) -> str:
    return "yes" if fits else "no"
