"""Generate options: the options of `spaceport generate`, in groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, get_args

import click

from spaceport.graphs.contract.signature import STEP_ROWS
from spaceport.runtime.backends import BACKENDS
from spaceport.runtime.decode.draft import DraftConfig, Shape
from spaceport.runtime.decoding import MAX_THREADS, Decoding
from spaceport.tools.cli.options import (
    PATH,
    Sectioned,
    allow_links_option,
    copy_weights_option,
    json_option,
    options,
    require_signature_option,
    step_costs_option,
    threads_option,
)


class Generate(Sectioned):
    """The command with its options in groups."""

    headings: ClassVar = {
        "prompt_file": "Prompt",
        "max_tokens": "Limits",
        "mask_slots": "Speculative decoding (never changes the output)",
        "fork": "Parallel threads (APAR)",
        "temperature": "Sampling",
        "regex": "Constrained decoding (turns parallel threads off)",
        "live": "Output",
        "backend": "Backend",
    }


def _int(flag: str, text: str, metavar: str = "N") -> Callable[[Any], Any]:
    return click.option(flag, type=int, metavar=metavar, help=text)


def _float(flag: str, text: str, metavar: str = "X") -> Callable[[Any], Any]:
    return click.option(flag, type=float, metavar=metavar, help=text)


def _file(flag: str, text: str) -> Callable[[Any], Any]:
    return click.option(flag, type=PATH, metavar="FILE", help=text)


def _flag(flag: str, text: str) -> Callable[[Any], Any]:
    return click.option(flag, is_flag=True, help=text)


prompts = options(
    _file("--prompt-file", "Read the prompt from a file."),
    _flag("--chat", "Use the prompt as a user message and apply the model's chat template."),
    click.option("--system", metavar="TEXT", help="With --chat: system message before the prompt."),
    click.option(
        "--chat-template-kwargs",
        metavar="JSON",
        help="With --chat: variables of the chat template as a JSON object, such as '{\"enable_thinking\": false}'.",
    ),
    _flag("--parse-special", "Read special tokens that the prompt spells out, such as </s>, as control tokens."),
)

lengths = options(
    _int("--max-tokens", "Maximum number of generated tokens, counted from the prompt to the end of each thread."),
    _int("--max-total-tokens", "Maximum number of generated tokens of all threads together."),
    _int("--max-seq-len", "Maximum context length in tokens (prompt and output); default: the model's, at most 4096."),
    _int("--max-slots", "KV cache slots for the prompt and the output of all threads; default: --max-seq-len."),
    click.option("--stop", multiple=True, metavar="TEXT", help="Stop string, not part of the output; repeatable."),
    click.option(
        "--stop-token-id",
        "stop_token_ids",
        multiple=True,
        type=int,
        metavar="N",
        help="Token id that ends a thread as an end token does; repeatable.",
    ),
    _int("--min-tokens", "Minimum number of generated tokens before an end token or --stop-token-id."),
    _flag("--ignore-eos", "Generate end tokens like others and continue, for benchmarks."),
    click.option(
        "--limit",
        "limits",
        multiple=True,
        metavar="NAME=N",
        help="Raise or lower a limit of requests, such as stop_strings=32; `inspect` shows all; repeatable.",
    ),
    _float("--timeout", "Stop after this time and return the output so far.", metavar="SECONDS"),
)

drafts = options(
    _int(
        "--mask-slots",
        "Maximum number of draft tokens from mask slots per thread and step; 0 = none; default: the bundle's limit.",
        metavar="K",
    ),
    click.option(
        "--draft",
        type=click.Choice(get_args(Shape)),
        help="Draft trees of candidates (default), or a chain with one candidate per position.",
    ),
    _int(
        "--draft-rows", f"Maximum rows of a thread in a draft step, at most {STEP_ROWS}; default: {DraftConfig.rows}."
    ),
    _int(
        "--draft-siblings",
        f"Maximum candidates per position of a draft tree; default: {DraftConfig.siblings}, "
        "or 1 for bundles with 8-bit activations.",
    ),
    _int(
        "--lookup",
        "Maximum number of draft tokens from prompt lookup (n-gram matches in prompt and output); 0 = none; "
        "default: chosen by cost.",
    ),
)

threads = options(
    click.option(
        "--fork/--no-fork",
        default=None,
        help="Generate parts of the output in parallel threads; default: if the bundle forks by default.",
    ),
    _int(
        "--max-threads",
        f"Maximum number of threads at once, others wait; default: {MAX_THREADS}, or 1 for bundles with 8-bit activations.",
    ),
    _int("--max-depth", f"Maximum depth of nested forks; default: {Decoding.max_depth}."),
)

sampling = options(
    _float("--temperature", "Sampling temperature; 0 = greedy (default).", metavar="T"),
    _int("--top-k", "Sample from the K most probable tokens; 0 = all (default).", metavar="K"),
    _float("--top-p", "Sample from the most probable tokens whose probabilities add up to P.", metavar="P"),
    _float("--min-p", "Drop tokens less probable than P times the most probable one.", metavar="P"),
    _int("--seed", "Random seed; default: random, shown by --stats and --json."),
    _float(
        "--repetition-penalty", "Penalize tokens that are in the prompt or the output; above 1 = fewer repetitions."
    ),
    _float("--presence-penalty", "Subtract X from the logits of tokens that are in the output."),
    _float("--frequency-penalty", "Subtract X from the logit of a token for each time it is in the output."),
    click.option("--logit-bias", multiple=True, metavar="ID=X", help="Add X to the logit of a token id; repeatable."),
    click.option(
        "--ban",
        "banned",
        multiple=True,
        metavar="TOKEN",
        help="Never generate this token: an id, or text that is a single token; repeatable.",
    ),
)

grammars = options(
    click.option("--regex", metavar="REGEX", help="Generate output that matches a regular expression as a whole."),
    _file("--json-schema", "Generate JSON that conforms to the JSON schema in a file."),
)

outputs = options(
    _flag("--live", "Show all threads side by side while they are generated (on a terminal)."),
    _flag("--show-drafts", "Mark accepted draft tokens: green on a terminal, in [brackets] elsewhere."),
    _flag("--stats", "Print statistics on stderr: speed, acceptance rate, KV slots."),
    json_option("text, tokens, threads and statistics"),
    _int(
        "--logprobs", "With --json: log probabilities of the generated tokens and of the N most probable alternatives."
    ),
    _file("--trace", "Write a trace of all steps as JSON."),
    _file("--report", "Write a trace of all steps as an HTML page."),
    _file("--picture", "Write a diagram of threads and steps as SVG."),
)

engines = options(
    click.option(
        "--backend",
        type=click.Choice(("auto", *BACKENDS, "torch")),
        default="auto",
        metavar="NAME",
        help=f"Backend: {', '.join(BACKENDS)}, torch; auto = the best one available (default).",
    ),
    click.option(
        "--checkpoint", type=PATH, metavar="FOLDER", help="With --backend torch: the checkpoint of this bundle."
    ),
    click.option(
        "--adapter",
        type=PATH,
        metavar="FOLDER",
        help="With --backend torch: the adapter that --checkpoint is the base of.",
    ),
    _flag("--trust-engines", "Also load TensorRT engines built on other machines: an engine file is code."),
    allow_links_option,
    require_signature_option,
    copy_weights_option,
    threads_option,
    step_costs_option,
)
