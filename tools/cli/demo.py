"""`spaceport demo`: export a checkpoint, compare it with PyTorch, and decode with and without drafts and threads."""

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
from spaceport.runtime.backends import check_threads
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
from spaceport.tools.verify.check.engines import CheckOptions

_ROUNDS = 3
LEGEND = f"""slots: peak number of KV slots in use. ms: shortest time of {_ROUNDS} runs.
speedup: tokens per second relative to plain decoding.
output: a speculative run is compared with the run in the line above it, token by token."""
THREADS_LEGEND = "Parallel threads may change the text, so their output is not compared with plain decoding."
NOTE = "The demo model is tiny and its answers are templated: do not compare these numbers with published ones."
COLUMNS = ("decoding", "tokens", "steps", "tokens per step", "slots", "ms", "speedup", "output")
_LONG = 256  # tokens of the longest case that is checked


@dataclass(frozen=True)
class DecodingMode:
    """A row of the table: whether drafts and parallel threads are on."""

    name: str
    drafts: bool
    forks: bool

    def decoding(self, max_tokens: int) -> Decoding:
        """Its options, with defaults for everything else."""
        return Decoding(max_tokens=max_tokens, mask_slots=None if self.drafts else 0, fork=self.forks)


MODES = (
    DecodingMode("plain", False, False),
    DecodingMode("speculative", True, False),
    DecodingMode("parallel threads", False, True),
    DecodingMode("both", True, True),
)


@dataclass(frozen=True)
class TimedCompletion:
    """A completion with the shortest of its run times."""

    completion: Completion
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of the fastest run."""
        return len(self.completion.tokens) / self.seconds

    def same_as(self, other: TimedCompletion) -> bool:
        """Whether all threads have the same tokens."""
        return self.completion.threads == other.completion.threads


@click.command("demo")
@click.argument("checkpoint", type=PATH, default=MODEL, metavar="[CHECKPOINT]")
@click.option(
    "--prompt",
    "prompts",
    multiple=True,
    metavar="TEXT",
    help="Prompt; repeatable. Default: the prompts in the checkpoint's prompts.json.",
)
@click.option(
    "--max-tokens",
    default=160,
    show_default=True,
    metavar="N",
    help="Maximum number of generated tokens, counted from the prompt to the end of each thread.",
)
@click.option("--threads", default=1, show_default=True, metavar="N", help="CPU threads; 0 = one per core.")
def command(checkpoint: Path, prompts: tuple[str, ...], max_tokens: int, threads: int) -> int:
    """Export CHECKPOINT to a temporary bundle, compare it with PyTorch, and measure speculative and parallel decoding.

    The default CHECKPOINT is the demo model in this package. It has two million parameters, explains the parameters of
    Python functions in templated answers, and continues Python source.
    """
    quiet_libraries()
    check_threads(threads)
    Decoding(max_tokens=max_tokens)  # raises before minutes of work
    chosen: dict[str, Prompt] = {prompt[:20]: prompt for prompt in prompts}
    chosen = chosen or prompts_of(checkpoint)
    with tempfile.TemporaryDirectory(prefix="spaceport-demo-") as folder:
        bundle = Path(folder) / "bundle"
        with stages() as stage:
            export(checkpoint, bundle, ExportOptions(), on_stage=stage)
            report = check(open_bundle(bundle), CheckOptions(checkpoint, length=_LONG, threads=threads), stage)
        worst = max(report.differences, key=lambda difference: difference.max_error)
        click.echo(
            f"\ncheck {'passed' if report.passed else 'FAILED'}: {len(report.differences)} cases, largest logit difference "
            f"from PyTorch {worst.max_error:.1e} (largest logit {worst.largest_logit:.0f})\n"
        )
        with Runtime.open(bundle, threads=threads) as runtime:
            same = compare(runtime, chosen, max_tokens)
            if checkpoint == MODEL:
                click.echo(NOTE)
            name, prompt = next(iter(chosen.items()))
            click.echo(f"\n{name}: output by thread, accepted draft tokens {_mark()}\n{_shown(prompt)}")
            show_generation(runtime, prompt, max_tokens)
    return OK if same and report.passed else ACCURACY


def compare(runtime: Runtime, prompts: Mapping[str, Prompt], max_tokens: int) -> bool:
    """Print a table for each prompt; whether every speculative run has the output of the run without drafts."""
    same, forks = True, False
    for name, prompt in prompts.items():
        rows = list(rows_of(timed(runtime, prompt, max_tokens)))
        show_table(name, COLUMNS, rows)
        click.echo()
        same = same and all(row[-1] != "DIFFERENT" for row in rows)
        forks = forks or any(row[0] == "parallel threads" for row in rows)
    click.echo(f"{LEGEND}\n{THREADS_LEGEND}" if forks else LEGEND)
    return same


def rows_of(found: Mapping[DecodingMode, TimedCompletion]) -> Iterator[tuple[object, ...]]:
    """The rows of a prompt's table."""
    plain = next(iter(found.values()))
    undrafted = plain
    for mode, one in found.items():
        verdict = "-"
        if mode.drafts:
            verdict = "identical" if one.same_as(undrafted) else "DIFFERENT"
        else:
            undrafted = one
        count, cost = len(one.completion.tokens), one.completion.statistics
        speed = one.tokens_per_second / plain.tokens_per_second
        yield mode.name, count, cost.steps, count / cost.steps, cost.peak_slots, one.seconds * 1e3, speed, verdict


def timed(runtime: Runtime, prompt: Prompt, max_tokens: int) -> dict[DecodingMode, TimedCompletion]:
    """Completions of a prompt in each mode that changes anything, with the runs of all modes interleaved."""
    masks, fork = runtime.bundle.manifest.max_mask_slots, runtime.bundle.manifest.tokens.fork
    modes = [mode for mode in MODES if (masks or not mode.drafts) and (fork is not None or not mode.forks)]
    found: dict[DecodingMode, TimedCompletion] = {}
    for _ in range(_ROUNDS):
        for mode in modes:
            started = perf_counter()
            completion = runtime.generate(prompt, mode.decoding(max_tokens))
            seconds = perf_counter() - started
            if mode not in found or seconds < found[mode].seconds:  # the table shows the steps of the fastest run
                found[mode] = TimedCompletion(completion, seconds)
        modes = [mode for mode in modes if not mode.forks or len(found[mode].completion.threads) > 1]
    return {mode: found[mode] for mode in modes}


def show_generation(runtime: Runtime, prompt: Prompt, max_tokens: int) -> None:
    """Generate and show all threads: live on a terminal, once at the end elsewhere."""
    lanes = Lanes(runtime.bundle.manifest.tokens.fork)
    with runtime.stream(prompt, Decoding(max_tokens=max_tokens)) as stream:
        if sys.stdout.isatty():
            show_live(stream, lanes, drafts=True)
        else:
            for piece in stream:
                lanes.add(piece)
            show_lanes(lanes)


def _mark() -> str:
    return "underlined" if sys.stdout.isatty() else "in [brackets]"


def _shown(prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    return "".join(f"{message['content']}\n" for message in prompt if not isinstance(message, int))
