"""Generate options: what `spaceport generate` can be told, and which of it makes no sense together."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, get_args

import click
from tokenizers import Tokenizer

from spaceport.graphs.contract.faults import InputFault, OptionFault
from spaceport.graphs.contract.manifest import Manifest
from spaceport.runtime.backends import BACKENDS
from spaceport.runtime.decode.draft import DraftConfig, Shape
from spaceport.runtime.decoding import MAX_THREADS, Decoding
from spaceport.runtime.sampling.grammar import Grammar
from spaceport.runtime.sampling.sampler import Sampling
from spaceport.runtime.text.tokenizer import encode
from spaceport.tools.cli.options import (
    PATH,
    Sectioned,
    Unused,
    json_option,
    options,
    refuse_unused,
    step_costs_option,
    threads_option,
)

_SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "seed"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)


class Generate(Sectioned):
    """The command with its options in groups."""

    headings: ClassVar = {
        "prompt_file": "Prompt",
        "max_tokens": "Length",
        "mask_slots": "Drafts (they never change the text)",
        "fork": "Threads",
        "temperature": "Choice of tokens (the likeliest, unless told otherwise)",
        "live": "Output",
        "backend": "Engine",
    }


prompts = options(
    click.option("--prompt-file", type=PATH, metavar="FILE", help="Read the prompt from a file."),
    click.option("--chat", is_flag=True, help="The prompt is what a user says: put it through the model's chat template."),
)  # fmt: skip

lengths = options(
    click.option("--max-tokens", type=int, metavar="N", help="Most tokens from the prompt to the end of any thread."),
    click.option("--max-total-tokens", type=int, metavar="N", help="Most tokens of all threads together; all of them end there."),
    click.option("--max-seq-len", type=int, metavar="N", help="Make room for so many tokens of prompt and text; by default what the model knows, at most 4096."),
    click.option("--max-slots", type=int, metavar="N", help="Make room for so many tokens of a prompt and all its threads; by default --max-seq-len."),
    click.option("--stop", multiple=True, metavar="TEXT", help="End the text before this; may be given more than once."),
    click.option("--timeout", type=float, metavar="SECONDS", help="End the text where it is after so long."),
)  # fmt: skip

drafts = options(
    click.option("--mask-slots", type=int, metavar="K", help="Most tokens that mask slots draft for a thread in a step, 0 for none; by default the bundle's limit."),
    click.option("--draft", type=click.Choice(get_args(Shape)), help="Draft trees of likely tokens, which is the default, or one chain of the likeliest."),
    click.option("--draft-rows", type=int, metavar="N", help=f"Most rows of a tree; {DraftConfig.rows} by default."),
    click.option("--draft-siblings", type=int, metavar="N", help=f"Most tokens that a tree tries for one place; {DraftConfig.siblings} by default, one where a bundle's drafts are exact in one line only."),
    click.option("--lookup", type=int, metavar="N", help="Most tokens that trees draft because they followed the last words before; some by default, 0 for none."),
)  # fmt: skip

threads = options(
    click.option("--fork/--no-fork", default=None, help="Whether the text may fork into threads; by default if the model can."),
    click.option("--max-threads", type=int, metavar="N", help=f"Most threads that write at the same time; {MAX_THREADS} by default, one where a bundle's drafts are exact in one line only. The others wait."),
    click.option("--max-depth", type=int, metavar="N", help=f"Most forks on the way to a thread; {Decoding.max_depth} by default."),
)  # fmt: skip

choices = options(
    click.option("--temperature", type=float, metavar="T", help="Draw tokens by their odds: 1 takes them as they are, less makes likely ones likelier, 0 draws nothing."),
    click.option("--top-k", type=int, metavar="N", help="Draw from the N likeliest tokens only."),
    click.option("--top-p", type=float, metavar="P", help="Draw from the likeliest tokens that are together so likely, 0 to 1."),
    click.option("--min-p", type=float, metavar="P", help="Draw from tokens at least P times as likely as the likeliest."),
    click.option("--seed", type=int, metavar="N", help="Draw the same text again; without one a seed is drawn too, and told by --stats and --json."),
    click.option("--repetition-penalty", type=float, metavar="X", help="Make tokens of prompt and text less likely (above 1)."),
    click.option("--presence-penalty", type=float, metavar="X", help="Take X off the logit of each token of the text."),
    click.option("--frequency-penalty", type=float, metavar="X", help="Take X off it for each time that it is in the text."),
    click.option("--logit-bias", multiple=True, metavar="ID=X", help="Add X to the logit of a token; may be given more than once."),
    click.option("--ban", "banned", multiple=True, metavar="TOKEN", help="Never write a token: its id, or text that is one token; may be given more than once."),
    click.option("--regex", metavar="REGEX", help="Write a text that matches this as a whole; it does not fork."),
    click.option("--json-schema", type=PATH, metavar="FILE", help="Write JSON that fits a schema; it does not fork."),
)  # fmt: skip

outputs = options(
    click.option("--live", is_flag=True, help="Draw the threads side by side as they grow, before the text (on a terminal)."),
    click.option("--show-drafts", is_flag=True, help="Mark tokens that were drafted and accepted: green, in a pipe in brackets."),
    click.option("--stats", is_flag=True, help="Say on stderr what the text cost."),
    json_option("text, tokens, threads and statistics"),
    click.option("--logprobs", type=int, metavar="N", help="With --json: how likely each token was, and the N likeliest in its place."),
    click.option("--trace", type=PATH, metavar="FILE", help="Write what every step did as JSON."),
    click.option("--report", type=PATH, metavar="FILE", help="Write it as an HTML page."),
    click.option("--picture", type=PATH, metavar="FILE", help="Write its threads and steps as a picture (SVG)."),
)  # fmt: skip

engines = options(
    click.option("--backend", type=click.Choice(("auto", *BACKENDS, "torch")), default="auto", metavar="NAME", help=f"What runs the model: {', '.join(BACKENDS)}, torch, or the best that is here (auto)."),
    click.option("--checkpoint", type=PATH, metavar="FOLDER", help="With --backend torch: the checkpoint that the bundle was made from."),
    click.option("--trust-engines", is_flag=True, help="Run engines of the bundle that were not built on this machine: they are code of whoever built them."),
    threads_option,
    step_costs_option,
)  # fmt: skip


def check_before(context: click.Context) -> None:
    """Raise for options that contradict each other or would do nothing, whatever the bundle is."""
    told = context.params
    if told["live"] and not sys.stdout.isatty():
        raise OptionFault(
            "--live draws on a terminal, and standard output is none: leave it out, or take --show-drafts"
        )
    if told["checkpoint"] is not None and told["backend"] != "torch":
        raise OptionFault("--checkpoint is only read with --backend torch: leave it out, or add that")
    if told["checkpoint"] is None and told["backend"] == "torch":
        raise OptionFault("--backend torch runs the checkpoint itself: name it with --checkpoint")
    grammar_flag = (
        "--regex" if told["regex"] is not None else "--json-schema" if told["json_schema"] is not None else ""
    )
    refuse_unused(
        context,
        (
            Unused(
                not told["temperature"],
                ("top_k", "top_p", "min_p", "seed"),
                "without --temperature",
                "add --temperature 1",
            ),
            Unused(
                bool(grammar_flag),
                ("max_threads", "max_depth"),
                f"with {grammar_flag}, which turns threads off",
                f"leave {grammar_flag} out",
            ),
            Unused(not told["as_json"], ("logprobs",), "without --json", "add --json"),
            Unused(told["as_json"], ("live", "show_drafts"), "with --json", "leave --json out"),
            Unused(
                told["draft"] == "chain", ("draft_rows", "draft_siblings"), "with --draft chain", "use --draft tree"
            ),
            Unused(
                told["backend"] == "torch",
                ("trust_engines", "step_costs"),
                "with --backend torch",
                "use another backend",
            ),
            Unused(told["fork"] is False, ("max_threads", "max_depth"), "with --no-fork", "leave --no-fork out"),
        ),
    )


def check_with(context: click.Context, manifest: Manifest, decoding: Decoding) -> None:
    """Raise for options that would do nothing with a bundle."""
    draft_config = decoding.draft_config(manifest.max_mask_slots, exact=manifest.exact_drafts)
    no_masks = draft_config.mask_slots == 0
    without = "with --mask-slots 0" if manifest.max_mask_slots else "with a bundle without mask slots"
    forks = manifest.tokens.fork is not None
    refuse_unused(
        context,
        (
            Unused(
                no_masks,
                ("draft_siblings",),
                without,
                "turn mask slots on" if manifest.max_mask_slots else "export the bundle with mask tokens",
            ),
            Unused(
                no_masks and not draft_config.lookup, ("draft", "draft_rows"), without, "turn mask slots or --lookup on"
            ),
            Unused(
                not forks,
                ("max_threads", "max_depth"),
                "with a bundle without a fork token",
                "export the bundle with a fork token",
            ),
        ),
    )


def decoding_of(told: dict[str, Any]) -> Decoding:
    """How a text is to be written, from what was said; what was not said is as it is by default."""
    said = {name: value for name, value in told.items() if value is not None}
    return Decoding(
        max_tokens=told["max_tokens"],
        max_total_tokens=told["max_total_tokens"],
        stop=told["stop"],
        timeout=told["timeout"],
        mask_slots=told["mask_slots"],
        draft=said.get("draft", Decoding.draft),
        draft_rows=said.get("draft_rows", Decoding.draft_rows),
        draft_siblings=said.get("draft_siblings", Decoding.draft_siblings),
        lookup=told["lookup"],
        fork=told["fork"],
        max_threads=said.get("max_threads", Decoding.max_threads),
        max_depth=said.get("max_depth", Decoding.max_depth),
        sampling=Sampling(
            **{name: said[name] for name in _SAMPLING if name in said}, logit_bias=_biases(told["logit_bias"])
        ),
        grammar=_grammar(told["regex"], told["json_schema"]),
        logprobs=told["logprobs"],
        trace=any(told[file] is not None for file in ("trace", "report", "picture")),
    )


def banned(given: Sequence[str], tokenizer: Tokenizer) -> list[int]:
    """The tokens that --ban names, by their ids or by their text."""
    found = []
    for token in given:
        ids = [int(token)] if token.isascii() and token.isdigit() else encode(tokenizer, token, special=False)
        if len(ids) != 1:
            raise OptionFault(f"--ban {token!r}: it is {len(ids)} tokens, {ids}: expected one; name it by its id")
        found += ids
    return found


def read_text(file: Path) -> str:
    """A text file."""
    try:
        return decoded(file.read_bytes(), str(file))
    except OSError as error:
        raise InputFault(f"{file}: {error.strerror}: expected a text file") from error


def decoded(data: bytes, source: str) -> str:
    """Text from a source of bytes."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputFault(
            f"{source}: byte {error.start} (0x{data[error.start]:02x}) is not UTF-8: expected text in UTF-8"
        ) from error


def _biases(given: Sequence[str]) -> dict[int, float]:
    found: dict[int, float] = {}
    for pair in given:
        token, _, bias = pair.partition("=")
        try:
            token_id, value = int(token), float(bias)
        except ValueError:
            raise OptionFault(f"--logit-bias is {pair!r}: expected a token id and a number, such as 42=-1.5") from None
        if token_id in found:
            raise OptionFault(f"--logit-bias names the token {token_id} twice: expected one number for it")
        found[token_id] = value
    return found


def _grammar(regex: str | None, schema: Path | None) -> Grammar | None:
    if regex is not None and schema is not None:
        raise OptionFault("--regex and --json-schema are both given: expected one of the two")
    if schema is not None:
        return Grammar(json_schema=read_text(schema))
    return None if regex is None else Grammar(regex=regex)
