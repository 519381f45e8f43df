"""`spaceport generate`: text from a prompt."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import click

from spaceport.graphs.faults import InputFault, OptionFault
from spaceport.runtime.admission import Prompt
from spaceport.runtime.bundle import open_bundle
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime
from spaceport.runtime.stream import Completion, Stream
from spaceport.tools.cli.screen import show_json


@click.command("generate")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("prompt", required=False)
@click.option("--prompt-file", type=click.Path(path_type=Path), help="Read the prompt from a file.")
@click.option("--chat", is_flag=True, help="The prompt is what a user says: put it through the model's chat template.")
@click.option(
    "--mask-slots",
    type=int,
    metavar="K",
    help="Tokens that each step drafts, 0 for plain decoding; by default the bundle's limit. It never changes the text.",
)
@click.option(
    "--max-tokens", type=int, metavar="N", help="Most tokens to write; by default until the text ends or --max-seq-len."
)
@click.option(
    "--max-seq-len",
    type=int,
    metavar="N",
    help="Longest prompt and text together; by default what the model knows, at most 4096.",
)
@click.option("--stop", multiple=True, metavar="TEXT", help="End the text before this; may be given more than once.")
@click.option("--backend", type=click.Choice(("auto", "onnxruntime", "torch")), default="auto", show_default=True)
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    help="With --backend torch: the checkpoint that the bundle was made from.",
)
@click.option("--threads", default=0, metavar="N", help="Processor threads; 0 means one for each core.")
@click.option("--stats", is_flag=True, help="Say on stderr what the text cost.")
@click.option("--show-drafts", is_flag=True, help="Mark tokens that were drafted and accepted.")
@click.option("--json", "as_json", is_flag=True, help="Print text, tokens and statistics as JSON.")
def command(
    bundle: Path,
    prompt: str | None,
    prompt_file: Path | None,
    chat: bool,
    mask_slots: int | None,
    max_tokens: int | None,
    max_seq_len: int | None,
    stop: tuple[str, ...],
    backend: str,
    checkpoint: Path | None,
    threads: int,
    stats: bool,
    show_drafts: bool,
    as_json: bool,
) -> None:
    """Write the text that BUNDLE continues PROMPT with; PROMPT - reads it from standard input."""
    text = read_prompt(prompt, prompt_file)
    given: Prompt = [{"role": "user", "content": text}] if chat else text
    with open_runtime(bundle, backend, checkpoint, max_seq_len, threads) as runtime:
        stream = runtime.stream(given, Decoding(max_tokens=max_tokens, mask_slots=mask_slots, stop=stop))
        if not as_json:
            show(stream, show_drafts)
        completion = stream.completion()
    if as_json:
        show_json(as_dict(completion))
    elif stats:
        show_statistics(completion)


def open_runtime(bundle: Path, backend: str, checkpoint: Path | None, max_seq_len: int | None, threads: int) -> Runtime:
    """The bundle on the backend that was asked for."""
    if backend != "torch":
        if checkpoint is not None:
            raise OptionFault("--checkpoint is only read with --backend torch: leave it out, or add that")
        return Runtime.open(bundle, backend=backend, max_seq_len=max_seq_len, threads=threads)
    if checkpoint is None:
        raise OptionFault("--backend torch runs the checkpoint itself: name it with --checkpoint")
    from spaceport.tools.reference import open_reference_runtime

    return open_reference_runtime(open_bundle(bundle), checkpoint, max_seq_len, threads)


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The prompt from wherever it was given."""
    if (prompt is None) == (prompt_file is None):
        raise OptionFault("expected one prompt: as PROMPT, with --prompt-file, or as - from standard input")
    if prompt_file is not None:
        try:
            return _text(prompt_file.read_bytes(), str(prompt_file))
        except OSError as error:
            raise InputFault(f"{prompt_file}: {error.strerror}: expected a text file") from error
    if prompt == "-":
        return _text(sys.stdin.buffer.read(), "standard input")
    assert prompt is not None
    return _text(prompt.encode("utf-8", "surrogateescape"), "the prompt")


def show(stream: Stream, drafts: bool) -> None:
    """The text as it comes; on a terminal drafted tokens are green, elsewhere they stand in brackets."""
    terminal, open_bracket = sys.stdout.isatty(), False
    for piece in stream:
        marked = drafts and piece.drafted
        if not piece.text:
            continue
        if not terminal and marked != open_bracket:
            click.echo("[" if marked else "]", nl=False)
            open_bracket = marked
        click.echo(click.style(piece.text, fg="green", underline=True) if terminal and marked else piece.text, nl=False)
        sys.stdout.flush()
    click.echo("]" if open_bracket else "")


def show_statistics(completion: Completion) -> None:
    """What a text cost, in one line for people."""
    s = completion.statistics
    share = ", ".join(f"{got}/{fed}" for got, fed in zip(s.accepted_by_depth, s.drafted_by_depth, strict=True))
    outside = s.outside_seconds / max(1, s.steps + s.prompt_steps) * 1e3
    click.echo(
        f"{len(completion.tokens)} tokens in {s.steps} steps ({s.tokens_per_step:.2f} a step), ended by {completion.ending}; "
        f"accepted by depth: {share or 'nothing drafted'}; {s.engine_seconds:.3f} s in the engine, {outside:.3f} ms a step outside it",
        err=True,
    )


def as_dict(completion: Completion) -> dict[str, Any]:
    """A completion for machines."""
    data = dataclasses.asdict(completion)
    data["statistics"]["tokens_per_step"] = completion.statistics.tokens_per_step
    return data


def _text(data: bytes, source: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputFault(
            f"{source}: byte {error.start} (0x{data[error.start]:02x}) is not UTF-8: expected text in UTF-8"
        ) from error
