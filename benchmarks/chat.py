"""`python -m benchmarks chat`: what drafts gain on chat prompts, by kind of prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import click

from benchmarks.chat_measuring import ChatOptions, PeerOptions, chosen_peers
from benchmarks.chat_report import benchmark_chat
from spaceport.graphs.contract.faults import OptionFault
from spaceport.tools.bench.decode_measuring import FORKING, MODES, parse_counts
from spaceport.tools.cli import ACCURACY, OK
from spaceport.tools.cli.options import (
    PATH,
    Sectioned,
    Unused,
    backend_option,
    bundle_argument,
    json_option,
    options,
    refuse_unused,
    trust_engines_option,
)
from spaceport.tools.report.files import check_target
from spaceport.tools.terminal.screen import stages

_MODES = ", ".join(name for name in MODES if name not in FORKING)


class ChatBenchmark(Sectioned):
    """The command with its options in groups."""

    headings: ClassVar = {
        "max_tokens": "Workload",
        "fork_kinds": "Forked threads",
        "checkpoint": "Other runtimes",
        "backend": "Engine",
        "markdown": "Output",
    }


workload = options(
    click.option(
        "--max-tokens", default=ChatOptions.max_tokens, show_default=True, metavar="N", help="Tokens per answer."
    ),
    click.option("--sample", type=int, metavar="N", help="Use only the first N prompts of each kind."),
    click.option("--modes", metavar="NAME,…", help=f"Modes among {_MODES}; default: all that the bundle supports."),
    click.option(
        "--fixed", metavar="K,K,…", help="Chains of K mask slots in every step, 0 = none; default: those of the bundle."
    ),
    click.option(
        "--rounds", type=int, metavar="N", help="Measured rounds after a warm-up; default: 3, or 1 from 40 prompts on."
    ),
    click.option("--seed", default=0, show_default=True, metavar="N", help="Seed of the intervals."),
)

forking = options(
    click.option(
        "--fork-kinds",
        default=",".join(ChatOptions.fork_kinds),
        show_default=True,
        metavar="KIND,…",
        help="Kinds that are also answered in forked threads, if the model forks.",
    ),
    click.option(
        "--fork-max-tokens",
        default=ChatOptions.fork_max_tokens,
        show_default=True,
        metavar="N",
        help="Tokens per thread of these answers.",
    ),
)

others = options(
    click.option("--checkpoint", type=PATH, metavar="FOLDER", help="The model of BUNDLE for transformers."),
    click.option("--gguf", type=PATH, metavar="FILE", help="The model of BUNDLE for llama.cpp."),
    click.option("--peers", metavar="NAME,…", help="Runtimes or their formats; default: all whose model is given."),
    click.option("--peer-sample", type=int, metavar="N", help="They answer only the first N prompts of each kind."),
    click.option(
        "--work", type=PATH, metavar="FOLDER", help="Folder of their environments, as in spaceport bench compare."
    ),
    click.option("--setup", is_flag=True, help="Create missing environments first; downloads packages with pip."),
)

engine = options(
    backend_option,
    click.option("--threads", default=ChatOptions.threads, show_default=True, metavar="N", help="CPU threads."),
    click.option("--max-seq-len", type=int, metavar="N", help="Maximum context length in tokens."),
    trust_engines_option,
)


@click.command("chat", cls=ChatBenchmark)
@bundle_argument
@click.argument("prompts", type=PATH)
@workload
@forking
@others
@engine
@click.option("--markdown", type=PATH, metavar="FILE", help="Also write the tables to FILE.")
@json_option("the report")
@click.pass_context
def command(context: click.Context, /, bundle: Path, prompts: Path, **values: Any) -> int:
    """Measure what drafts gain on the chat prompts of the file PROMPTS, by kind of prompt.

    One JSON object per line, with "kind" and "messages"; user turns are answered in order. All modes and other runtimes
    answer a prompt in turns, greedy, one request at a time. Exit code 4 if a drafted answer differs from the plain one.
    """
    peer_options = peer_options_of(context, values)
    chat_options = options_of(values)
    if values["markdown"] is not None:
        check_target(values["markdown"])
    with stages() as on_progress:
        report = benchmark_chat(bundle, prompts, chat_options, peer_options, on_progress)
    report.show(values["as_json"], values["markdown"])
    return OK if report.identical else ACCURACY


def options_of(values: dict[str, Any]) -> ChatOptions:
    """The options of the benchmark from the command's parameters."""
    modes, fixed = values["modes"], values["fixed"]
    return ChatOptions(
        max_tokens=values["max_tokens"],
        sample=values["sample"],
        modes=None if modes is None else _names(modes),
        fixed=() if fixed == "0" else None if fixed is None else parse_counts("--fixed", fixed),
        rounds=values["rounds"],
        seed=values["seed"],
        fork_kinds=_names(values["fork_kinds"]),
        fork_max_tokens=values["fork_max_tokens"],
        backend=values["backend"],
        threads=values["threads"],
        max_seq_len=values["max_seq_len"],
        trust_engines=values["trust_engines"],
    )


def peer_options_of(context: click.Context, values: dict[str, Any]) -> PeerOptions | None:
    """The other runtimes from the command's parameters; None without any."""
    checkpoint, gguf, work, sample = (values[name] for name in ("checkpoint", "gguf", "work", "peer_sample"))
    peers = chosen_peers(values["peers"], checkpoint, gguf)
    alone = ("work", "setup", "peer_sample")
    refuse_unused(
        context, [Unused(not peers, alone, "without other runtimes", "add --checkpoint FOLDER or --gguf FILE")]
    )
    if not peers:
        return None
    if work is None:
        raise OptionFault(
            "no --work: expected the folder with the environments of the other runtimes: add --work FOLDER"
        )
    if sample is not None and sample < 1:
        raise OptionFault(f"--peer-sample is {sample}: expected at least 1")
    return PeerOptions(peers, work, checkpoint, gguf, sample, values["setup"])


def _names(text: str) -> tuple[str, ...]:
    """The names in `plain,default`."""
    return tuple(dict.fromkeys(name for part in text.split(",") if (name := part.strip())))
