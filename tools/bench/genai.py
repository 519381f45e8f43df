"""Genai: one-row steps of Spaceport and of onnxruntime-genai on one checkpoint, in turn, in one process."""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from types import ModuleType
from typing import Any

import numpy as np

from spaceport.graphs.contract.faults import MissingPart
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime


@dataclass(frozen=True)
class PairedSteps:
    """Median times of steps that both runtimes took in turn."""

    context: int  # tokens of the prompt
    threads: int  # CPU threads of each
    steps: int  # of each
    spaceport_ms: float
    genai_ms: float
    ratio: float  # median of spaceport / genai over the pairs


def genai_library() -> ModuleType:
    """The package onnxruntime-genai, which is no dependency of Spaceport."""
    try:
        import onnxruntime_genai
    except ModuleNotFoundError as error:
        raise MissingPart(
            "`spaceport bench genai` needs the package onnxruntime-genai: pip install onnxruntime-genai"
        ) from error
    library: ModuleType = onnxruntime_genai
    return library


def compare(bundle: Path, genai: Path, threads: int, context: int, tokens: int, rounds: int) -> PairedSteps:
    """Steps of the bundle, decoded plainly, beside steps of the same checkpoint in the format of onnxruntime-genai."""
    og = genai_library()
    prompt = np.random.default_rng(0).integers(0, 200, context).tolist()
    ours: list[float] = []
    theirs: list[float] = []
    with Runtime.open(bundle, threads=threads) as runtime, with_threads(genai, threads) as folder:
        model = og.Model(str(folder))
        for _ in range(rounds):
            generator = started(og, model, prompt, context + tokens + 1)
            with runtime.stream(prompt, Decoding(max_tokens=tokens, mask_slots=0)) as stream:
                next(stream)
                for piece in range(tokens - 1):
                    before = perf_counter()
                    if next(stream, None) is None or generator.is_done():
                        break
                    between = perf_counter()
                    generator.generate_next_token()
                    if piece > 2:
                        ours.append(between - before)
                        theirs.append(perf_counter() - between)
            del generator
    return PairedSteps(
        context,
        threads,
        len(ours),
        statistics.median(ours) * 1e3,
        statistics.median(theirs) * 1e3,
        statistics.median(a / b for a, b in zip(ours, theirs, strict=True)),
    )


def started(og: Any, model: Any, prompt: list[int], length: int) -> Any:
    """A generator that has read the prompt and written the first token."""
    options = og.GeneratorParams(model)
    options.set_search_options(max_length=length, do_sample=False)
    generator = og.Generator(model, options)
    generator.append_tokens(np.array(prompt, np.int32))
    generator.generate_next_token()
    return generator


@contextmanager
def with_threads(genai: Path, threads: int) -> Iterator[Path]:
    """The folder with its number of threads set, without touching the original."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in genai.iterdir():
            (folder / file.name).symlink_to(file.resolve())
        config = json.loads((genai / "genai_config.json").read_text("utf-8"))
        config["model"]["decoder"]["session_options"]["intra_op_num_threads"] = threads
        (folder / "genai_config.json").unlink()
        (folder / "genai_config.json").write_text(json.dumps(config), "utf-8")
        yield folder
        shutil.rmtree(folder, ignore_errors=True)
