"""`spaceport generate`: generate text from a prompt."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import starmap
from pathlib import Path
from typing import Any

import click
from tokenizers import Tokenizer

from spaceport.graphs.contract.exactness import unmeasured
from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.manifest import TEMPLATE_FILE, Manifest
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.sampling.grammar import Grammar
from spaceport.runtime.sampling.sampler import Sampling
from spaceport.runtime.session import Runtime
from spaceport.runtime.text.messages import ChatPrompt
from spaceport.runtime.text.prompt import Prompt
from spaceport.runtime.text.tokenizer import encode
from spaceport.runtime.trace import Trace
from spaceport.tools.cli.bundle_cache import bundle_at
from spaceport.tools.cli.options import (
    PATH,
    Sectioned,
    Unused,
    backend_option,
    bundle_argument,
    declared_options,
    declared_values,
    decoded,
    json_option,
    limit_option,
    max_seq_len_option,
    max_slots_option,
    options,
    read_text,
    refuse_unused,
    runtime_engine_options,
    runtime_options,
    sections,
)
from spaceport.tools.terminal.generation import as_dict, show, show_statistics
from spaceport.tools.terminal.screen import show_json, show_notes

_THREADS = ("max_threads", "max_depth")  # options of forks


class Generate(Sectioned):
    """A prompt that looks like an option is an error that says how to give it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the arguments; a prompt that looks like an option is an error that says how to give it."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            prompt = next((word for word in given if re.match(r"-[^=]*\s", word)), None)
            if prompt is None:
                raise
            shown = prompt if len(prompt) < 40 else f"{prompt[:39]}…"
            raise click.UsageError(
                f"{shown!r} was read as an option: put -- before a prompt that begins with -, or give it with --prompt-file",
                ctx,
            ) from error


_prompts = options(
    click.option("--prompt-file", type=PATH, metavar="FILE", help="Read the prompt from a file."),
    click.option("--chat", is_flag=True, help="Use the prompt as a user message and apply the model's chat template."),
    click.option("--system", metavar="TEXT", help="With --chat: system message before the prompt."),
    click.option(
        "--chat-template-kwargs",
        metavar="JSON",
        help="With --chat: variables of the chat template as a JSON object, such as '{\"enable_thinking\": false}'.",
    ),
)
_outputs = options(
    click.option(
        "--show-drafts",
        is_flag=True,
        help="Mark accepted draft tokens: green on a terminal, in [brackets] elsewhere.",
    ),
    click.option("--stats", is_flag=True, help="Print statistics on stderr: speed, acceptance rate, KV slots."),
    json_option("text, tokens, threads and statistics"),
    click.option("--trace", type=PATH, metavar="FILE", help="Write a trace of all steps as JSON."),
    click.option("--report", type=PATH, metavar="FILE", help="Write a trace of all steps as an HTML page."),
)
_engines = options(
    max_seq_len_option,
    max_slots_option,
    limit_option,
    backend_option,
    runtime_engine_options,
)


@sections(
    {
        "prompt_file": "Prompt",
        "max_tokens": "Limits",
        "mask_slots": "Speculative decoding (never changes the output)",
        "fork": "Parallel threads (APAR)",
        "temperature": "Sampling",
        "regex": "Constrained decoding (turns parallel threads off)",
        "logprobs": "Output",
        "show_drafts": "Output",
        "max_seq_len": "Limits",
        "backend": "Backend",
    },
    *("prompt_file", "chat", "system", "max_tokens", "stop", "temperature", "top_p", "seed", "json_schema"),
    *("stats", "as_json", "report", "backend", "threads"),
)
@click.command("generate", cls=Generate)
@bundle_argument
@click.argument("prompt", required=False)
@_prompts
@declared_options(Decoding)
@declared_options(Sampling)
@declared_options(Grammar)
@_outputs
@_engines
@click.pass_context
def command(context: click.Context, /, bundle: Path, prompt: str | None, **given: Any) -> None:
    """Generate text from PROMPT with BUNDLE, or with a checkpoint or GGUF file.

    Without PROMPT, and with -, the prompt comes from standard input.
    """
    check_before(context)
    check_files(given["trace"], given["report"])
    text = read_prompt(prompt, given["prompt_file"])
    prompted: Prompt = chat_prompt(text, given["system"], given["chat_template_kwargs"]) if given["chat"] else text
    decoding = decoding_of(given)
    bundle = bundle_at(bundle)
    with Runtime.open(bundle, **runtime_options(given)) as runtime:
        show_notes(runtime.notes)
        check_with(context, runtime.bundle.manifest, decoding)
        if given["chat"] and TEMPLATE_FILE not in runtime.bundle.manifest.files:
            raise OptionFault(f"--chat: {bundle} has no chat template: leave --chat out and give a plain prompt")
        banned_ids = _token_ids(given["banned"], runtime.tokenizer)
        decoding = replace(decoding, sampling=replace(decoding.sampling, banned=banned_ids))
        with runtime.stream(prompted, decoding) as stream:
            if not given["as_json"]:
                show(stream, runtime.bundle.manifest.tokens.fork, given["show_drafts"])
            completion = stream.completion()
        if completion.trace is not None:
            write_files(completion.trace, runtime.tokenizer, given, f"Generation of {bundle.name}")
    if given["as_json"]:
        show_json(as_dict(completion))
    if given["stats"]:
        show_statistics(completion)


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The prompt from the argument, a file or standard input, which is read if neither is given and it is no terminal."""
    expected = "expected PROMPT, --prompt-file FILE, or a prompt on standard input"
    if prompt is not None and prompt_file is not None:
        raise OptionFault(f"PROMPT and --prompt-file are both given: {expected}")
    if prompt_file is not None:
        return read_text(prompt_file)
    if prompt not in (None, "-"):
        return decoded(prompt.encode("utf-8", "surrogateescape"), "the prompt")
    if prompt is None and sys.stdin.isatty():
        raise OptionFault(f"no prompt: {expected}")
    text = decoded(sys.stdin.buffer.read(), "standard input")
    if not text:
        raise OptionFault(f"no prompt, and standard input is empty: {expected}")
    return text


def check_files(trace: Path | None, report: Path | None) -> None:
    """Raise if a file that an option names cannot be written, or if both name the same file."""
    files = [file for file in (trace, report) if file is not None]
    if files:
        from spaceport.tools.report.files import check_target

        for file in files:
            check_target(file)
    if len({file.resolve() for file in files}) < len(files):
        raise OptionFault(f"--trace and --report are both {trace}: expected two files")


def write_files(trace: Trace, tokenizer: Tokenizer, given: Mapping[str, Any], title: str) -> None:
    """Write the trace and the report that the options ask for."""
    from spaceport.tools.report.files import write_report, write_trace

    record = trace.record(tokenizer)
    if given["trace"] is not None:
        write_trace(given["trace"], record)
        click.echo(f"{given['trace']}: trace written", err=True)
    if given["report"] is not None:
        write_report(given["report"], record, title)
        click.echo(f"{given['report']}: report written", err=True)


def check_before(context: click.Context) -> None:
    """Raise for options that contradict each other or have no effect, whatever the bundle is."""
    given = context.params
    grammar = "--regex" if given["regex"] is not None else "--json-schema" if given["json_schema"] is not None else ""
    sampling, chain = ("top_k", "top_p", "min_p", "seed"), given["draft"] == "chain"
    rules = (
        (not given["temperature"], sampling, "without --temperature", "add --temperature 1"),
        (bool(grammar), _THREADS, f"with {grammar}, which turns threads off", f"leave {grammar} out"),
        (not given["as_json"], ("logprobs",), "without --json", "add --json"),
        (not given["chat"], ("system", "chat_template_kwargs"), "without --chat", "add --chat"),
        (given["as_json"], ("show_drafts",), "with --json", "leave --json out"),
        (chain, ("draft_rows", "draft_siblings"), "with --draft chain", "use --draft tree"),
        (given["fork"] is False, _THREADS, "with --no-fork", "leave --no-fork out"),
    )
    refuse_unused(context, starmap(Unused, rules))


def check_with(context: click.Context, manifest: Manifest, decoding: Decoding) -> None:
    """Raise for options that have no effect with this bundle."""
    drafts = decoding.draft_config(manifest.drafts, unmeasured(manifest).allows_drafts)
    no_masks, forks = not (drafts.mask_slots or drafts.heads), manifest.tokens.fork is not None
    without, remedy = "with a bundle without mask slots", "export the bundle with mask tokens"
    if manifest.drafts.max_tokens:
        without, remedy = "with --mask-slots 0", "turn mask slots on"
    no_fork = "with a bundle without a fork token"
    rules = (
        (no_masks, ("draft_siblings",), without, remedy),
        (no_masks and not drafts.lookup, ("draft", "draft_rows"), without, "turn mask slots or --lookup on"),
        (not forks, _THREADS, no_fork, "export the bundle with a fork token"),
    )
    refuse_unused(context, starmap(Unused, rules))


def decoding_of(given: Mapping[str, Any]) -> Decoding:
    """The `Decoding` that the options ask for; tokens that are banned need the bundle's tokenizer."""
    sampling, grammar = declared_values(Sampling, given), declared_values(Grammar, given)
    if "regex" in grammar and "json_schema" in grammar:
        raise OptionFault("--regex and --json-schema are both given: expected one of them")
    if "json_schema" in grammar:
        grammar["json_schema"] = read_text(grammar["json_schema"])
    decoding = declared_values(Decoding, given)
    return Decoding(
        **decoding | {"trace": given["trace"] is not None or given["report"] is not None},
        sampling=Sampling(**sampling | {"logit_bias": _biases(given["logit_bias"]), "banned": ()}),
        grammar=Grammar(**grammar) if grammar else None,
    )


def chat_prompt(text: str, system: str | None, template_kwargs: str | None) -> ChatPrompt:
    """The prompt as a user message, after a system message if there is one."""
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    try:
        variables = {} if template_kwargs is None else json.loads(template_kwargs)
    except (ValueError, RecursionError) as error:
        raise OptionFault(f"--chat-template-kwargs: {error}: expected a JSON object") from error
    if not isinstance(variables, dict):
        raise OptionFault(f"--chat-template-kwargs is {template_kwargs!r:.60}: expected a JSON object")
    return ChatPrompt(messages, template_kwargs=variables)


def _token_ids(given: Sequence[str], tokenizer: Tokenizer) -> list[int]:
    """The token ids of --ban, which takes ids and texts."""
    found = []
    for token in given:
        ids = [int(token)] if token.isascii() and token.isdigit() else encode(tokenizer, token, special=False)
        if len(ids) != 1:
            raise OptionFault(f"--ban {token!r} is {len(ids)} tokens, {ids}: expected one token; give its id")
        found += ids
    return found


def _biases(given: Sequence[str]) -> dict[int, float]:
    found: dict[int, float] = {}
    for pair in given:
        token, _, bias = pair.partition("=")
        try:
            token_id, value = int(token), float(bias)
        except ValueError:
            raise OptionFault(f"--logit-bias is {pair!r}: expected a token id and a number, such as 42=-1.5") from None
        if token_id in found:
            raise OptionFault(f"--logit-bias names token {token_id} twice: expected one number per token")
        found[token_id] = value
    return found
