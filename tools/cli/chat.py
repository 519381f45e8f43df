"""`spaceport chat`: chat with a bundle or a service on the terminal."""

from __future__ import annotations

import os
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.sampling.sampler import Sampling
from spaceport.runtime.session import Runtime
from spaceport.tools.chat.conversation import Chat, ChatHistory
from spaceport.tools.chat.models import AnswerOptions, BundleModel, ChatModel, ServiceModel
from spaceport.tools.cli.bundle_cache import bundle_at
from spaceport.tools.cli.configuration import KEY_VARIABLE, keys_of
from spaceport.tools.cli.options import (
    PATH,
    Sectioned,
    Unused,
    allow_links_option,
    backend_option,
    declared_options,
    decoded,
    max_seq_len_option,
    options,
    refuse_unused,
    runtime_options,
    threads_option,
    trust_engines_option,
)
from spaceport.tools.terminal.screen import show_notes

_BUNDLE = ("backend", "threads", "max_seq_len", "trust_engines", "allow_links")
_SERVICE = ("model", "api_key_file")


class ChatCommand(Sectioned):
    """The command with its options in groups."""

    headings = {"system": "Conversation", "max_tokens": "Answers", "model": "Service", "backend": "Bundle"}  # noqa: RUF012


_conversation = options(
    click.option("--system", metavar="TEXT", help="System prompt."),
    click.option("--load", type=PATH, metavar="FILE", help="Continue the conversation in this file."),
    click.option("--no-colour", "--no-color", "no_colour", is_flag=True, help="Print plain text."),
)
_answers = options(
    declared_options(Decoding, "max_tokens"),
    declared_options(Sampling, "temperature", "top_p", unset="as the model suggests"),
    declared_options(Sampling, "seed"),
    click.option("--drafts/--no-drafts", default=True, help="Speculative decoding; the text is the same without."),
    click.option("--fork", is_flag=True, help="Let the text fork into threads, if the bundle can."),
)
_service = options(
    click.option("--model", metavar="NAME", help="Model of the service; default: its only one."),
    click.option(
        "--api-key-file",
        type=PATH,
        metavar="FILE",
        help=f"File whose first key is sent; default: the first one in {KEY_VARIABLE}.",
    ),
)
_bundle = options(
    backend_option,
    threads_option,
    max_seq_len_option,
    trust_engines_option,
    allow_links_option,
)


@click.command("chat", cls=ChatCommand)
@click.argument("target", metavar="BUNDLE-OR-URL")
@_conversation
@_answers
@_service
@_bundle
@click.pass_context
def command(context: click.Context, /, target: str, **given: Any) -> None:
    """Chat with a bundle, a checkpoint or GGUF file, or a service at a URL such as http://127.0.0.1:8000.

    Without a terminal, standard input is one message, and the answer is plain text.
    """
    is_url = "://" in target
    refuse_unused(
        context,
        [
            Unused(is_url, _BUNDLE, "with a URL", "give a bundle"),
            Unused(not is_url, _SERVICE, "with a bundle", "give the URL of a service"),
        ],
    )
    conversation = ChatHistory(given["system"])
    with closing(model_of(target, is_url, given)) as model:
        colours = not given["no_colour"] and not os.environ.get("NO_COLOR")
        chat = Chat(model, conversation, terminal=sys.stdout.isatty(), colours=colours)
        if given["load"] is not None:
            chat.load(given["load"])
            if given["system"] is not None:
                conversation.set_system(given["system"])
        if sys.stdin.isatty():
            import readline  # noqa: F401  (line editing for input)

            chat.run()
        else:
            text = decoded(sys.stdin.buffer.read(), "standard input").strip("\n")
            if not text:
                raise OptionFault("standard input is empty: expected a message")
            chat.respond(text)


def model_of(target: str, is_url: bool, given: dict[str, Any]) -> ChatModel:
    """The model to chat with."""
    names = ("max_tokens", "temperature", "top_p", "seed", "drafts", "fork")
    answers = AnswerOptions(**{name: given[name] for name in names})
    if is_url:
        keys = keys_of(given["api_key_file"], os.environ.get(KEY_VARIABLE, ""))
        return ServiceModel(target, given["model"], keys[0] if keys else None, answers)
    runtime = Runtime.open(
        bundle_at(Path(target)),
        prefix_cache=True,
        **runtime_options(given),
    )
    try:
        show_notes(runtime.notes)
        return BundleModel(runtime, answers)
    except BaseException:
        runtime.close()
        raise
