"""`spaceport generate`: generate text from a prompt."""

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
from spaceport.graphs.contract.manifest import TEMPLATE_FILE
from spaceport.runtime.bundle import open_bundle
from spaceport.runtime.engine import capacity_for, seq_len, slots_for
from spaceport.runtime.session import Runtime
from spaceport.runtime.text.prompt import Prompt
from spaceport.runtime.trace import Trace
from spaceport.tools.cli.bundle_cache import bundle_of
from spaceport.tools.cli.generate_options import (
    Generate,
    drafts,
    engines,
    grammars,
    lengths,
    outputs,
    prompts,
    sampling,
    threads,
)
from spaceport.tools.cli.generate_request import (
    banned,
    chat_prompt,
    check_before,
    check_with,
    decoded,
    decoding_of,
    limits_of,
    read_text,
)
from spaceport.tools.cli.options import bundle_argument
from spaceport.tools.terminal.generate_screen import as_dict, show, show_live, show_statistics
from spaceport.tools.terminal.lanes import Lanes
from spaceport.tools.terminal.screen import show_json, show_notes


@click.command("generate", cls=Generate)
@bundle_argument
@click.argument("prompt", required=False)
@prompts
@lengths
@drafts
@threads
@sampling
@grammars
@outputs
@engines
@click.pass_context
def command(context: click.Context, /, bundle: Path, prompt: str | None, **given: Any) -> None:
    """Generate text from PROMPT with BUNDLE, or with a checkpoint or GGUF file; - reads the prompt from standard input."""
    check_before(context)
    check_files({f"--{name}": given[name] for name in ("trace", "report", "picture")})
    text = read_prompt(prompt, given["prompt_file"])
    prompted: Prompt = chat_prompt(text, given["system"], given["chat_template_kwargs"]) if given["chat"] else text
    decoding = decoding_of(given)
    bundle = bundle_of(bundle, given["require_signature"])
    with open_runtime(bundle, given) as runtime:
        show_notes(runtime.notes)
        check_with(context, runtime.bundle.manifest, decoding)
        if given["chat"] and TEMPLATE_FILE not in runtime.bundle.manifest.files:
            raise OptionFault(f"--chat: {bundle} has no chat template: leave --chat out and give a plain prompt")
        banned_ids = banned(given["banned"], runtime.tokenizer)
        decoding = replace(decoding, sampling=replace(decoding.sampling, banned=banned_ids))
        lanes = Lanes(runtime.bundle.manifest.tokens.fork)
        with runtime.stream(prompted, decoding) as stream:
            if given["live"]:
                show_live(stream, lanes, given["show_drafts"])
            elif not given["as_json"]:
                show(stream, lanes, given["show_drafts"])
            completion = stream.completion()
        if completion.trace is not None:
            write_files(completion.trace, runtime.tokenizer, given, f"Generation of {bundle.name}")
    if given["as_json"]:
        show_json(as_dict(completion))
    if given["stats"]:
        show_statistics(completion)


def open_runtime(bundle: Path, given: dict[str, Any]) -> Runtime:
    """The bundle, opened on the backend of --backend."""
    backend, checkpoint = given["backend"], given["checkpoint"]
    max_seq_len, max_slots = given["max_seq_len"], given["max_slots"]
    if backend != "torch":
        return Runtime.open(
            bundle,
            backend=backend,
            max_seq_len=max_seq_len,
            max_slots=max_slots,
            limits=limits_of(given["limits"]),
            threads=given["threads"],
            trust_engines=given["trust_engines"],
            step_costs=given["step_costs"],
            allow_links=given["allow_links"],
            copy_weights=given["copy_weights"],
            require_signature=given["require_signature"],
        )
    from spaceport.tools.reference import open_reference

    opened = open_bundle(bundle, allow_links=given["allow_links"], require_signature=given["require_signature"])
    length = seq_len(opened.manifest, max_seq_len)
    slots = slots_for(length, max_slots)
    capacity = capacity_for(opened.manifest, slots)
    engine = open_reference(opened, checkpoint, capacity, 1, threads=given["threads"], adapter=given["adapter"])
    return Runtime(opened, engine, length, slots, limits=limits_of(given["limits"]))


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The prompt from the argument, a file or standard input."""
    if (prompt is None) == (prompt_file is None):
        given = "no prompt" if prompt is None else "PROMPT and --prompt-file are both given"
        raise OptionFault(f"{given}: expected either PROMPT (- reads standard input) or --prompt-file FILE")
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


def write_files(trace: Trace, tokenizer: Tokenizer, given: dict[str, Any], title: str) -> None:
    """Write the trace, the report and the picture that the options ask for."""
    from spaceport.tools.report.files import write_report, write_text, write_trace
    from spaceport.tools.report.picture import figure_of

    record = trace.record(tokenizer)
    if given["trace"] is not None:
        write_trace(given["trace"], record)
    if given["report"] is not None:
        write_report(given["report"], record, title)
    if given["picture"] is not None:
        write_text(given["picture"], figure_of(record, title))
