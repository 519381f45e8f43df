"""`spaceport generate`: text from a prompt."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import click
from tokenizers import Tokenizer

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.bundle import open_bundle
from spaceport.runtime.scheduling.capacity import capacity_for, seq_len, slots_for
from spaceport.runtime.session import Runtime
from spaceport.runtime.text.prompt import Prompt
from spaceport.runtime.trace.trace import Trace
from spaceport.tools.cli.generate_options import (
    Generate,
    banned,
    check_before,
    check_with,
    choices,
    decoded,
    decoding_of,
    drafts,
    engines,
    lengths,
    outputs,
    prompts,
    read_text,
    threads,
)
from spaceport.tools.cli.options import bundle_argument
from spaceport.tools.terminal.generate_screen import as_dict, show, show_live, show_statistics
from spaceport.tools.terminal.lanes import Lanes
from spaceport.tools.terminal.screen import show_json, show_notes


@click.command("generate", cls=Generate, context_settings={"max_content_width": 110})
@bundle_argument
@click.argument("prompt", required=False)
@prompts
@lengths
@drafts
@threads
@choices
@outputs
@engines
@click.pass_context
def command(context: click.Context, /, bundle: Path, prompt: str | None, **told: Any) -> None:
    """Write the text that BUNDLE continues PROMPT with; PROMPT - reads it from standard input."""
    check_before(context)
    check_files({f"--{name}": told[name] for name in ("trace", "report", "picture")})
    text = read_prompt(prompt, told["prompt_file"])
    given: Prompt = [{"role": "user", "content": text}] if told["chat"] else text
    decoding = decoding_of(told)
    with open_runtime(bundle, told) as runtime:
        show_notes(runtime.notes)
        check_with(context, runtime.bundle.manifest, decoding)
        never = banned(told["banned"], runtime.tokenizer)
        decoding = replace(decoding, sampling=replace(decoding.sampling, banned=never))
        lanes = Lanes(runtime.bundle.manifest.tokens.fork)
        with runtime.stream(given, decoding) as stream:
            if told["live"]:
                show_live(stream, lanes, told["show_drafts"])
            elif not told["as_json"]:
                show(stream, lanes, told["show_drafts"])
            completion = stream.completion()
        if completion.trace is not None:
            write_files(completion.trace, runtime.tokenizer, told, f"Text of {bundle.name}")
    if told["as_json"]:
        show_json(as_dict(completion))
    if told["stats"]:
        show_statistics(completion)


def open_runtime(bundle: Path, told: dict[str, Any]) -> Runtime:
    """The bundle on the backend that was asked for."""
    backend, checkpoint = told["backend"], told["checkpoint"]
    max_seq_len, max_slots = told["max_seq_len"], told["max_slots"]
    if backend != "torch":
        return Runtime.open(
            bundle,
            backend=backend,
            max_seq_len=max_seq_len,
            max_slots=max_slots,
            threads=told["threads"],
            trust_engines=told["trust_engines"],
            step_costs=told["step_costs"],
        )
    from spaceport.tools.reference import open_reference

    opened = open_bundle(bundle)
    length = seq_len(opened.manifest, max_seq_len)
    slots = slots_for(length, max_slots)
    capacity = capacity_for(opened.manifest, slots)
    return Runtime(opened, open_reference(opened, checkpoint, capacity, 1, threads=told["threads"]), length, slots)


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The prompt from wherever it was given."""
    if (prompt is None) == (prompt_file is None):
        raise OptionFault("expected one prompt: as PROMPT, with --prompt-file, or as - from standard input")
    if prompt_file is not None:
        return read_text(prompt_file)
    if prompt == "-":
        return decoded(sys.stdin.buffer.read(), "standard input")
    assert prompt is not None
    return decoded(prompt.encode("utf-8", "surrogateescape"), "the prompt")


def check_files(files: Mapping[str, Path | None]) -> None:
    """Raise if a file that an option names cannot be written, or if two options name the same file."""
    named = {option: file for option, file in files.items() if file is not None}
    if named:
        from spaceport.tools.report.files import check_target

        for file in named.values():
            check_target(file)
    for (one, file), (other, same) in combinations(named.items(), 2):
        if file.resolve() == same.resolve():
            raise OptionFault(f"{one} and {other} are both {file}: expected two files")


def write_files(trace: Trace, tokenizer: Tokenizer, told: dict[str, Any], title: str) -> None:
    """Write the trace, the report and the picture that the options ask for."""
    from spaceport.tools.report.figure import figure_of
    from spaceport.tools.report.files import write_report, write_text, write_trace

    record = trace.record(tokenizer)
    if told["trace"] is not None:
        write_trace(told["trace"], record)
    if told["report"] is not None:
        write_report(told["report"], record, title)
    if told["picture"] is not None:
        write_text(told["picture"], figure_of(record, title))
