"""Generate request: the options of `spaceport generate` checked and turned into a `Decoding`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from tokenizers import Tokenizer

from spaceport.graphs.contract.exactness import unmeasured
from spaceport.graphs.contract.faults import InputFault, OptionFault
from spaceport.graphs.contract.manifest import Manifest
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.limits import DEFAULT_LIMITS, Limits
from spaceport.runtime.sampling.grammar import Grammar
from spaceport.runtime.sampling.sampler import Sampling
from spaceport.runtime.text.messages import ChatPrompt
from spaceport.runtime.text.tokenizer import encode
from spaceport.tools.cli.options import Unused, refuse_unused

_SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "seed"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)


def check_before(context: click.Context) -> None:
    """Raise for options that contradict each other or have no effect, whatever the bundle is."""
    given = context.params
    if given["live"] and not sys.stdout.isatty():
        raise OptionFault("--live needs a terminal, and standard output is none: leave it out, or use --show-drafts")
    if given["checkpoint"] is not None and given["backend"] != "torch":
        raise OptionFault("--checkpoint has no effect without --backend torch: add --backend torch, or leave it out")
    if given["adapter"] is not None and given["checkpoint"] is None:
        raise OptionFault("--adapter has no effect without --checkpoint: name its base model with --checkpoint")
    if given["checkpoint"] is None and given["backend"] == "torch":
        raise OptionFault("--backend torch runs the PyTorch checkpoint: name its folder with --checkpoint")
    grammar_flag = (
        "--regex" if given["regex"] is not None else "--json-schema" if given["json_schema"] is not None else ""
    )
    refuse_unused(
        context,
        (
            Unused(
                not given["temperature"],
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
            Unused(not given["as_json"], ("logprobs",), "without --json", "add --json"),
            Unused(not given["chat"], ("system", "chat_template_kwargs"), "without --chat", "add --chat"),
            Unused(given["as_json"], ("live", "show_drafts"), "with --json", "leave --json out"),
            Unused(
                given["draft"] == "chain", ("draft_rows", "draft_siblings"), "with --draft chain", "use --draft tree"
            ),
            Unused(
                given["backend"] == "torch",
                ("trust_engines", "step_costs", "copy_weights"),
                "with --backend torch",
                "use another backend",
            ),
            Unused(given["fork"] is False, ("max_threads", "max_depth"), "with --no-fork", "leave --no-fork out"),
        ),
    )


def check_with(context: click.Context, manifest: Manifest, decoding: Decoding) -> None:
    """Raise for options that have no effect with this bundle."""
    draft_config = decoding.draft_config(manifest.drafts, unmeasured(manifest).drafts)
    no_masks = not (draft_config.mask_slots or draft_config.heads)
    without = "with --mask-slots 0" if manifest.drafts.max_tokens else "with a bundle without mask slots"
    forks = manifest.tokens.fork is not None
    refuse_unused(
        context,
        (
            Unused(
                no_masks,
                ("draft_siblings",),
                without,
                "turn mask slots on" if manifest.drafts.max_tokens else "export the bundle with mask tokens",
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


def decoding_of(given: Mapping[str, Any]) -> Decoding:
    """The `Decoding` that the options ask for, with defaults for those that are not given."""
    chosen = {name: value for name, value in given.items() if value is not None}
    return Decoding(
        max_tokens=given["max_tokens"],
        max_total_tokens=given["max_total_tokens"],
        stop=given["stop"],
        stop_token_ids=given["stop_token_ids"],
        min_tokens=chosen.get("min_tokens", Decoding.min_tokens),
        ignore_eos=given["ignore_eos"],
        timeout=given["timeout"],
        mask_slots=given["mask_slots"],
        draft=chosen.get("draft", Decoding.draft),
        draft_rows=chosen.get("draft_rows", Decoding.draft_rows),
        draft_siblings=chosen.get("draft_siblings", Decoding.draft_siblings),
        lookup=given["lookup"],
        fork=given["fork"],
        max_threads=chosen.get("max_threads", Decoding.max_threads),
        max_depth=chosen.get("max_depth", Decoding.max_depth),
        sampling=Sampling(
            **{name: chosen[name] for name in _SAMPLING if name in chosen}, logit_bias=_biases(given["logit_bias"])
        ),
        grammar=_grammar(given["regex"], given["json_schema"]),
        logprobs=given["logprobs"],
        parse_special=given["parse_special"],
        trace=any(given[file] is not None for file in ("trace", "report", "picture")),
    )


def limits_of(given: Sequence[str]) -> Limits:
    """The limits with those that --limit names changed."""
    changed: dict[str, int] = {}
    for pair in given:
        name, _, number = pair.partition("=")
        if name not in DEFAULT_LIMITS.as_dict() or not (number.isascii() and number.isdigit()):
            names = ", ".join(DEFAULT_LIMITS.as_dict())
            raise OptionFault(f"--limit is {pair!r}: expected NAME=N with one of {names}")
        changed[name] = int(number)
    return replace(DEFAULT_LIMITS, **changed)


def banned(given: Sequence[str], tokenizer: Tokenizer) -> list[int]:
    """The token ids of --ban, which takes ids and texts."""
    found = []
    for token in given:
        ids = [int(token)] if token.isascii() and token.isdigit() else encode(tokenizer, token, special=False)
        if len(ids) != 1:
            raise OptionFault(f"--ban {token!r} is {len(ids)} tokens, {ids}: expected one token; give its id")
        found += ids
    return found


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


def read_text(file: Path) -> str:
    """The content of a text file."""
    try:
        return decoded(file.read_bytes(), str(file))
    except OSError as error:
        raise InputFault(f"{file}: {error.strerror}: expected a text file that can be read") from error


def decoded(data: bytes, source: str) -> str:
    """UTF-8 bytes as text; `source` names them in errors."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputFault(
            f"{source}: byte {error.start} (0x{data[error.start]:02x}) is not valid UTF-8: expected UTF-8 text"
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
            raise OptionFault(f"--logit-bias names token {token_id} twice: expected one number per token")
        found[token_id] = value
    return found


def _grammar(regex: str | None, schema: Path | None) -> Grammar | None:
    if regex is not None and schema is not None:
        raise OptionFault("--regex and --json-schema are both given: expected one of them")
    if schema is not None:
        return Grammar(json_schema=read_text(schema))
    return None if regex is None else Grammar(regex=regex)
