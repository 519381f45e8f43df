"""Against onnxruntime-genai: one-row steps of both on one checkpoint, in turn, in one process.

Needs the package onnxruntime-genai; it is no dependency of Spaceport:
    python -m onnxruntime_genai.models.builder -m CHECKPOINT -o GENAI -p fp32 -e cpu
    python -m spaceport.tools.bench.against_genai BUNDLE GENAI --threads 1
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import click
import numpy as np

from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime
from spaceport.tools.terminal.screen import show_json, show_table


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("genai", type=click.Path(path_type=Path))
@click.option("--threads", default=1, show_default=True, help="Processor threads of each.")
@click.option("--context", default=256, show_default=True, help="Tokens of the prompt.")
@click.option("--tokens", default=64, show_default=True, help="Tokens that each writes in a round.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def command(bundle: Path, genai: Path, threads: int, context: int, tokens: int, rounds: int, as_json: bool) -> None:
    """Median time of a token from BUNDLE, decoded plainly, and from GENAI, the same checkpoint in its own format."""
    import onnxruntime_genai as og

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
    report = {
        "context": context,
        "threads": threads,
        "steps": len(ours),
        "spaceport_ms": statistics.median(ours) * 1e3,
        "genai_ms": statistics.median(theirs) * 1e3,
        "ratio": statistics.median(a / b for a, b in zip(ours, theirs, strict=True)),
    }
    if as_json:
        show_json(report)
        return
    rows = [("spaceport", report["spaceport_ms"]), (f"onnxruntime-genai {og.__version__}", report["genai_ms"])]
    show_table(
        f"One-row steps behind {context} tokens, {threads} thread(s), {len(ours)} pairs",
        ("runtime", "ms a token"),
        rows,
    )
    click.echo(f"median of the paired ratios: {report['ratio']:.3f}")


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


if __name__ == "__main__":
    command()
