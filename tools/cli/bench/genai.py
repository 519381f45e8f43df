"""`spaceport bench genai`: one-row steps beside those of onnxruntime-genai."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from spaceport.tools.bench.genai import compare, genai_library
from spaceport.tools.cli.options import PATH, bundle_argument, json_option
from spaceport.tools.terminal.screen import show_json, show_table


@click.command("genai")
@bundle_argument
@click.argument("genai", type=PATH)
@click.option("--threads", default=1, show_default=True, help="Processor threads of each.")
@click.option("--context", default=256, show_default=True, help="Tokens of the prompt.")
@click.option("--tokens", default=64, show_default=True, help="Tokens that each writes in a round.")
@click.option("--rounds", default=3, show_default=True)
@json_option("it")
def command(bundle: Path, genai: Path, threads: int, context: int, tokens: int, rounds: int, as_json: bool) -> None:
    """Median time of a token from BUNDLE, decoded plainly, and from GENAI, the same checkpoint in its own format.

    Needs the package onnxruntime-genai. GENAI is what
    `python -m onnxruntime_genai.models.builder -m CHECKPOINT -o GENAI -p fp32 -e cpu` writes.
    """
    found = compare(bundle, genai, threads, context, tokens, rounds)
    if as_json:
        show_json(asdict(found))
        return
    rows = [("spaceport", found.spaceport_ms), (f"onnxruntime-genai {genai_library().__version__}", found.genai_ms)]
    show_table(
        f"One-row steps behind {context} tokens, {threads} thread(s), {found.steps} pairs",
        ("runtime", "ms a token"),
        rows,
    )
    click.echo(f"median of the paired ratios: {found.ratio:.3f}")
