"""`spaceport demo`: the whole way once: export a checkpoint, check it, decode plainly, with drafts and in threads."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import click

from spaceport.exporter.export import ExportOptions, export
from spaceport.exporter.quiet import quiet_libraries
from spaceport.runtime.bundle import open_bundle
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.scheduling.generation import Completion
from spaceport.runtime.session import Runtime
from spaceport.runtime.text.prompt import Prompt
from spaceport.tools.cli.exit_codes import ACCURACY, OK
from spaceport.tools.cli.options import PATH
from spaceport.tools.demo.prompts import MODEL, prompts_of
from spaceport.tools.terminal.generate_screen import show_lanes, show_live
from spaceport.tools.terminal.lanes import Lanes
from spaceport.tools.terminal.screen import show_table, stages
from spaceport.tools.verify.check.check import check
from spaceport.tools.verify.check.lineup import CheckOptions

TEXTS = (
    "text: a drafted text is compared with the one in the line above it, thread by thread\n"
    "and token by token. A forked text may differ from the plain one: they are not compared."
)
NOTE = "The model is tiny and its answers are templated: these numbers are no comparison with published ones."
COLUMNS = ("decoding", "tokens", "steps", "tokens a step", "slots", "ms", "speed", "text")
_LONG = 256  # tokens of the longest case that is checked
_ROUNDS = 3


@dataclass(frozen=True)
class DecodingMode:
    """A way to write a text."""

    name: str
    drafts: bool
    forks: bool

    def decoding(self, max_tokens: int) -> Decoding:
        """The same, with everything else as it is by default."""
        return Decoding(max_tokens=max_tokens, mask_slots=None if self.drafts else 0, fork=self.forks)


MODES = (
    DecodingMode("plain", False, False),
    DecodingMode("drafted", True, False),
    DecodingMode("forked", False, True),
    DecodingMode("forked + drafted", True, True),
)


@dataclass(frozen=True)
class Timed:
    """A text, and the shortest of the times that it took."""

    completion: Completion
    seconds: float

    @property
    def pace(self) -> float:
        """Tokens of the text in a second."""
        return len(self.completion.tokens) / self.seconds

    def same_as(self, other: Timed) -> bool:
        """Whether every thread wrote the same."""
        return self.completion.threads == other.completion.threads


@click.command("demo")
@click.argument("checkpoint", type=PATH, default=MODEL, metavar="[CHECKPOINT]")
@click.option(
    "--prompt", "prompts", multiple=True, help="Prompt to decode; by default those in the checkpoint's prompts.json."
)
@click.option(
    "--max-tokens", default=160, show_default=True, help="Most tokens from the prompt to the end of any thread."
)
@click.option("--threads", default=1, show_default=True, metavar="N", help="Processor threads.")
def command(checkpoint: Path, prompts: tuple[str, ...], max_tokens: int, threads: int) -> int:
    """Export CHECKPOINT into a temporary folder, check it, and write texts plainly, with drafts and in threads.

    Without CHECKPOINT it is the model that comes along: two million weights that explain the parameters of Python
    functions, in templated answers, and continue Python source.
    """
    quiet_libraries()
    chosen: dict[str, Prompt] = {prompt[:20]: prompt for prompt in prompts}
    chosen = chosen or prompts_of(checkpoint)
    with tempfile.TemporaryDirectory(prefix="spaceport-demo-") as folder:
        bundle = Path(folder) / "bundle"
        with stages() as stage:
            export(checkpoint, bundle, ExportOptions(), stage=stage)
            report = check(open_bundle(bundle), CheckOptions(checkpoint, length=_LONG, threads=threads), stage)
        worst = max(report.differences, key=lambda difference: difference.max_error)
        click.echo(
            f"\nchecked: {len(report.differences)} kinds of calls, largest difference to PyTorch {worst.max_error:.1e} "
            f"(logits up to {worst.largest_logit:.0f}): {'passed' if report.passed else 'FAILED'}\n"
        )
        with Runtime.open(bundle, threads=threads) as runtime:
            same = compare(runtime, chosen, max_tokens)
            if checkpoint == MODEL:
                click.echo(NOTE)
            name, prompt = next(iter(chosen.items()))
            click.echo(f"\n{name}, thread by thread, accepted drafts marked:\n{_shown(prompt)}")
            play(runtime, prompt, max_tokens)
    return OK if same and report.passed else ACCURACY


def compare(runtime: Runtime, prompts: Mapping[str, Prompt], max_tokens: int) -> bool:
    """A table for each prompt, written in every way; whether drafts changed no text."""
    same, forks = True, False
    for name, prompt in prompts.items():
        rows = list(lines_of(timed(runtime, prompt, max_tokens)))
        show_table(name, COLUMNS, rows)
        click.echo()
        same = same and all(row[-1] != "DIFFERENT" for row in rows)
        forks = forks or any(row[0] == "forked" for row in rows)
    if forks:
        click.echo(TEXTS)
    return same


def lines_of(found: Mapping[DecodingMode, Timed]) -> Iterator[tuple[object, ...]]:
    """The lines of a prompt's table."""
    plain = next(iter(found.values()))
    undrafted = plain
    for mode, one in found.items():
        verdict = "-"
        if mode.drafts:
            verdict = "same" if one.same_as(undrafted) else "DIFFERENT"
        else:
            undrafted = one
        count, cost = len(one.completion.tokens), one.completion.statistics
        speed = one.pace / plain.pace
        yield mode.name, count, cost.steps, count / cost.steps, cost.peak_slots, one.seconds * 1e3, speed, verdict


def timed(runtime: Runtime, prompt: Prompt, max_tokens: int) -> dict[DecodingMode, Timed]:
    """A text in every way that makes a difference, timed in turn."""
    masks, fork = runtime.bundle.manifest.max_mask_slots, runtime.bundle.manifest.tokens.fork
    modes = [mode for mode in MODES if (masks or not mode.drafts) and (fork is not None or not mode.forks)]
    found: dict[DecodingMode, Timed] = {}
    for _ in range(_ROUNDS):
        for mode in modes:
            started = perf_counter()
            completion = runtime.generate(prompt, mode.decoding(max_tokens))
            seconds = perf_counter() - started
            if mode not in found or seconds < found[mode].seconds:  # its steps belong to its time
                found[mode] = Timed(completion, seconds)
        modes = [mode for mode in modes if not mode.forks or len(found[mode].completion.threads) > 1]
    return {mode: found[mode] for mode in modes}


def play(runtime: Runtime, prompt: Prompt, max_tokens: int) -> None:
    """A text as its threads grow; in a pipe, as they were in the end."""
    lanes = Lanes(runtime.bundle.manifest.tokens.fork)
    with runtime.stream(prompt, Decoding(max_tokens=max_tokens)) as stream:
        if sys.stdout.isatty():
            show_live(stream, lanes, drafts=True)
        else:
            for piece in stream:
                lanes.hear(piece)
            show_lanes(lanes)


def _shown(prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    return "".join(f"{message['content']}\n" for message in prompt if not isinstance(message, int))
