"""`spaceport demo`: export a checkpoint, compare it with PyTorch, and decode with and without drafts and threads; `--code`."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import click

from spaceport.exporter.checkpoint import quiet_libraries
from spaceport.exporter.export import ExportOptions
from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.formats import FORMATS
from spaceport.runtime.backends import check_threads
from spaceport.runtime.bundle import open_bundle
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.scheduling.request import Completion
from spaceport.runtime.session import Runtime
from spaceport.runtime.text.prompt import Prompt
from spaceport.tools.bench.decode_measuring import (
    DEFAULT,
    FORKED,
    FORKING,
    PLAIN,
    DecodeMeasurements,
    DecodeMode,
    DecodeOptions,
    measure_modes,
    modes_for,
)
from spaceport.tools.cli import ACCURACY, OK
from spaceport.tools.cli.bundle_cache import CachedBundle, model_name
from spaceport.tools.cli.inspect import accuracy
from spaceport.tools.cli.options import PATH, adapter_option
from spaceport.tools.demo.prompts import CODER, MODEL, prompts_of
from spaceport.tools.terminal.generation import show
from spaceport.tools.terminal.screen import interruptible_stages, show_notes, show_table, stages
from spaceport.verify.accuracy import write_report
from spaceport.verify.cases import CheckOptions
from spaceport.verify.check import check
from spaceport.verify.prompts import TokenizedPrompt

COLUMNS = ("prompt", "decoding", "tokens", "steps", "tokens per step", "tokens/s", "speedup", "output")
LEGEND = """speedup: relative to the plain run of the same round, median (range). tokens/s: median, prompt included.
output: a speculative run is compared with the run in the line above it, token by token.
Parallel threads may change the text, so their output is not compared with plain decoding."""
NOTE = "The demo model is tiny and its answers are templated: do not compare these numbers with published ones."

CODE_COLUMNS = ("prompt", "tokens", "plain, s", "drafted, s", "speedup", "tokens per step", "output")
CODE_TOKENS, TOKENS, ROUNDS = 400, 160, 5

# Mode of the benchmark -> its name in the table
MODE_TITLES = {PLAIN: "plain", DEFAULT: "speculative", FORKED: "parallel threads", "forked+drafted": "both"}
_Row = tuple[object, ...]


@click.command("demo")
@click.argument("checkpoint", type=PATH, required=False)
@click.option(
    "--code",
    is_flag=True,
    help="Export CHECKPOINT, a chat model that writes code, with its weights as stored, and show its answers to coding "
    "prompts as they grow, plain and drafted.",
)
@adapter_option
@click.option(
    "--prompt",
    "prompts",
    multiple=True,
    metavar="TEXT",
    help="Prompt; repeatable. Default: the prompts in the checkpoint's prompts.json; with --code: an edit, a fix and two questions.",
)
@click.option(
    "--max-tokens",
    type=int,
    metavar="N",
    help=f"Maximum number of generated tokens; default: {TOKENS}, with --code {CODE_TOKENS}.",
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
    code: bool,
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
    Python functions in templated answers, and continues Python source; the demo takes about a minute. Each decoding mode
    runs once in each of 5 rounds.
    """
    quiet_libraries()
    check_threads(threads)
    Decoding(max_tokens=max_tokens)  # raises before minutes of work
    if page and prompts:
        raise OptionFault("--page with --prompt: prompts are typed into the page; leave one of them out")
    if page:
        import spaceport.serving.server  # noqa: F401  (a missing package is reported before minutes of work)
    if code and checkpoint is None:
        raise OptionFault("--code without CHECKPOINT: name a chat model; `make demo-code` in a checkout downloads one")
    if code and page:
        raise OptionFault("--code with --page: expected one of them; leave the other out")
    model = checkpoint or MODEL
    texts: dict[str, Prompt] = {f"{number} {text[:20]}": text for number, text in enumerate(prompts, 1)}
    asked = texts or prompts_of(CODER if code else model)
    with nullcontext(cache) if cache else tempfile.TemporaryDirectory(prefix="spaceport-demo-") as folder:
        options = ExportOptions(FORMATS["stored"], adapter=adapter) if code else ExportOptions(adapter=adapter)
        cached = CachedBundle.of(model, Path(folder), options)
        kept = model if cache is None else cached.path
        if code:
            return OK if answer_code(cached, asked, max_tokens or CODE_TOKENS, threads, kept) else ACCURACY
        passed = prepare(cached, adapter, threads)
        if page:
            serve_page(cached.path, threads, port)
            return OK if passed else ACCURACY
        with Runtime.open(cached.path, threads=threads) as runtime:
            same = compare(runtime, asked, max_tokens or TOKENS)
            if model == MODEL:
                click.echo(NOTE)
            show_answer(runtime, asked, max_tokens or TOKENS)
        click.echo(next_steps(kept))
    return OK if same and passed else ACCURACY


def prepare(cached: CachedBundle, adapter: Path | None, threads: int) -> bool:
    """Export and check a bundle, unless an earlier run did; whether it has passed."""
    if cached.exists and (accuracy(open_bundle(cached.path)) or {}).get("passed") is True:
        click.echo(f"using {cached.path}, which passed the check when it was exported\n")
        return True
    if not cached.exists:
        cached.export()
    with interruptible_stages() as stage:
        options = CheckOptions(cached.checkpoint, length=256, threads=threads, adapter=adapter)
        report = check(open_bundle(cached.path), options, stage)
    worst = max(report.differences, key=lambda difference: difference.max_error)
    click.echo(
        f"\ncheck {'passed' if report.passed else 'FAILED'}: {len(report.differences)} cases, largest logit difference "
        f"from PyTorch {worst.max_error:.1e} (largest logit {worst.largest_logit:.0f})\n"
    )
    if report.passed:
        write_report(cached.path, report.as_dict())
    return report.passed


def compare(runtime: Runtime, prompts: Mapping[str, Prompt], max_tokens: int) -> bool:
    """Print the table; whether every speculative run has the output of the run without drafts."""
    manifest = runtime.bundle.manifest
    names = [name for name in MODE_TITLES if manifest.tokens.fork is not None or name not in FORKING]
    modes = modes_for(manifest, max_tokens, names)
    tokenized = [
        TokenizedPrompt(number, tuple(runtime.tokens_of(prompt))) for number, prompt in enumerate(prompts.values())
    ]
    with stages() as stage:
        measured = measure_modes(modes, runtime, tokenized, DecodeOptions(max_tokens, rounds=ROUNDS), stage)
    rows = [row for number, name in enumerate(prompts) for row in rows_of(name, number, modes, measured)]
    show_table("", COLUMNS, rows)
    click.echo(f"\n{LEGEND}")
    return not measured.differences


def rows_of(name: str, prompt: int, modes: Sequence[DecodeMode], measured: DecodeMeasurements) -> Iterator[_Row]:
    """The rows of a prompt in the table, without those of forks if its text does not fork."""
    runs = {
        mode: [one.statistics for one in measured.completions if (one.mode, one.prompt) == (mode.name, prompt)]
        for mode in modes
    }
    different = {one.mode for one in measured.differences if one.line == prompt}
    plain = runs[modes[0]]
    for mode, found in runs.items():
        if mode.decoding.fork and found[0].threads == 1:
            continue
        speeds = [one.tokens_per_second for one in found]
        ratios = [speed / base.tokens_per_second for speed, base in zip(speeds, plain, strict=True)]
        spread = "" if found is plain else f" ({min(ratios):.2f}-{max(ratios):.2f})"
        drafted = "DIFFERENT" if mode.name in different else "identical"
        output = "-" if mode.name == mode.reference else drafted
        tokens, steps = found[0].tokens - (found[0].threads - 1), found[0].steps  # without [Fork]s
        counts = (tokens, steps, tokens / steps)
        yield (name, MODE_TITLES[mode.name], *counts, median(speeds), f"{median(ratios):.2f}{spread}", output)
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


def serve_page(bundle: Path, threads: int, port: int) -> None:
    """Serve a bundle with its page until a signal."""
    from spaceport.serving.application import application
    from spaceport.serving.server import listening, serve

    opener = partial(Runtime.open, bundle, threads=threads, max_requests=4, prefix_cache=True)
    click.echo(f"open http://127.0.0.1:{port} in a browser; Ctrl-C ends it")
    with listening("127.0.0.1", port) as listener:
        serve(application({"demo": opener}, answers_while_opening=True), listener)


def answer_code(cached: CachedBundle, prompts: Mapping[str, Prompt], max_tokens: int, threads: int, kept: Path) -> bool:
    """Show the answers to messages, plain and drafted, and a table of both; whether all drafted texts are the plain ones."""
    if cached.exists:
        click.echo(f"using {cached.path}, which was exported before", err=True)
    else:
        cached.export()
    drafted = Decoding(max_tokens=max_tokens, fork=False)
    plain = drafted.without_drafts()
    with stages() as stage:
        stage("opening the model, measuring steps")
        runtime = Runtime.open(cached.path, threads=threads)
        for decoding in (plain, drafted):
            runtime.generate(next(iter(prompts.values())), replace(decoding, max_tokens=4))  # the first takes longer
    rows = []
    with runtime:
        show_notes(runtime.notes)
        for number, (name, prompt) in enumerate(prompts.items(), 1):
            click.echo(f"\n== {number} of {len(prompts)}: {name} ==\n{prompt}")
            chat = [{"role": "user", "content": prompt}]
            first, second = (
                answered(runtime, chat, decoding, title) for decoding, title in ((plain, "plain"), (drafted, "drafted"))
            )
            output = "identical" if (first.tokens, first.text) == (second.tokens, second.text) else "DIFFERENT"
            seconds, faster = first.statistics.seconds, second.statistics.seconds
            per_step = second.statistics.tokens_per_step
            rows.append((name, len(first.tokens), seconds, faster, seconds / faster, per_step, output))
    click.echo()
    show_table("", CODE_COLUMNS, rows)
    click.echo(code_next_steps(kept, model_name(cached.checkpoint)))
    return all(row[-1] == "identical" for row in rows)


def answered(runtime: Runtime, prompt: Prompt, decoding: Decoding, title: str) -> Completion:
    """Show an answer while it is generated, and its time; accepted draft tokens are underlined on a terminal."""
    click.echo(f"\n-- {title} --")
    with runtime.stream(prompt, decoding) as stream:
        show(stream, None, drafts=sys.stdout.isatty())
        completion = stream.completion()
    statistics = completion.statistics
    click.echo(
        f"-- {statistics.tokens} tokens in {statistics.seconds:.1f} s, "
        f"{statistics.tokens_per_step:.2f} tokens per step --"
    )
    return completion


def next_steps(model: Path) -> str:
    """What to run after the demo, with its model and with another one."""
    program, shown = program_and(model)
    return (
        f"\nnext: `{program} generate {shown} TEXT` runs this model, with `chat` it answers messages,\n"
        f"`{program} export MODEL my.bundle` exports yours: a Hugging Face folder or a GGUF file"
    )


def code_next_steps(model: Path, name: str) -> str:
    """What to run after the demo of a coding model."""
    program, shown = program_and(model)
    return f"""
next, on the terminal:
  {program} chat {shown}
in a browser at http://127.0.0.1:8000, and for editors:
  {program} serve {name}={shown}
An editor's configuration needs the provider OpenAI, the address http://127.0.0.1:8000/v1, the model {name} and any key:
docs/service.md#editors has one."""


def program_and(model: Path) -> tuple[str, str]:
    """The program and the path of a model, as they are typed in a shell in this folder."""
    program = "spaceport" if shutil.which("spaceport") else f"{os.path.relpath(sys.executable)} -m spaceport"
    return program, shlex.quote(os.path.relpath(model) if model.is_relative_to(Path.cwd()) else str(model))
