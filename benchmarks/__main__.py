"""`python -m benchmarks`: the modes of bundles and other runtimes, in turns, on the same workloads."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import click
from click import option

from benchmarks.measuring import NO_KIND, WORKLOADS, Prompt, Subject, Workload, measure, other_subject, own_subject
from benchmarks.on_spaceport import MODE_NAMES, mode_named
from benchmarks.report import described_machine, results_table, write_result
from benchmarks.runtimes import RUNTIMES, WorkFolder, runtimes_named, set_up
from spaceport.graphs.contract.faults import InputFault, OptionFault
from spaceport.runtime.bundle import read_manifest
from spaceport.runtime.session import Runtime
from spaceport.tools.bench.decode_measuring import PLAIN
from spaceport.tools.bench.report import Report
from spaceport.tools.cli import ACCURACY, OK, run
from spaceport.tools.cli.bench import parse_counts
from spaceport.tools.cli.options import PATH, backend_option
from spaceport.tools.report.files import check_target
from spaceport.tools.terminal.screen import stages
from spaceport.verify.prompts import read_prompts, tokenize_prompts

_DEFAULT = Workload()


def prompts_of(runtime: Runtime, file: Path, kinds: Sequence[str], sample: int | None, tokens: int) -> list[Prompt]:
    """The first `sample` prompts of each of these kinds, or all; the kinds alternate."""
    read = read_prompts(file)
    known = dict.fromkeys(prompt.kind or NO_KIND for prompt in read)
    if unknown := [kind for kind in kinds if kind not in known]:
        raise OptionFault(f"--kinds names {unknown[0]!r}: expected kinds of {file}: {', '.join(known)}")
    by_kind = defaultdict[str, list[Prompt]](list)
    for prompt, tokenized in zip(read, tokenize_prompts(runtime, read, tokens, file), strict=True):
        kind = prompt.kind or NO_KIND
        if kind in (kinds or known) and (sample is None or len(by_kind[kind]) < sample):
            by_kind[kind].append(Prompt(prompt.line, kind, tokenized.tokens))
    return [prompt for row in zip_longest(*by_kind.values()) for prompt in row if prompt is not None]


def own_subjects(bundles: Sequence[Path], modes: Sequence[str], backend: str) -> list[Subject]:
    """The modes of all bundles; those without drafts are the references of the others."""
    named = [mode_named(name) for name in dict.fromkeys((PLAIN, *modes))]
    subjects = []
    for bundle in dict.fromkeys(bundles):
        manifest = read_manifest(bundle)
        prefix = f"{bundle} " if len(bundles) > 1 else ""
        for mode in named:
            mode.decoding(manifest)  # raises if the bundle does not support it
            reference = None if mode.name == PLAIN else prefix + PLAIN
            subjects.append(own_subject(prefix + mode.name, bundle, mode.name, backend, reference))
    return subjects


@click.command("benchmarks", context_settings={"max_content_width": 110, "show_default": True})
@click.argument("bundles", nargs=-1, required=True, type=PATH, metavar="BUNDLE…")
@option("--workloads", default="decode", help=f"Workloads among {', '.join(WORKLOADS)}.")
@option("--prompts", type=PATH, help="File of prompts to decode, one JSON object per line, with a `kind`.")
@option("--kinds", default="", help="Only prompts of these kinds.")
@option("--sample", type=click.IntRange(1), help="Only this many prompts of each kind, the first ones.")
@option("--max-tokens", default=_DEFAULT.max_tokens, help="Tokens per answer.")
@option("--rows", default="1,2,4,9,16,36", help="Rows per step to measure.")
@option("--context", default=_DEFAULT.context, help="Cached tokens before the rows.")
@option("--prefill", default="128,1024", help="Prompt tokens of prefills.")
@option("--requests", default=_DEFAULT.requests, help="Concurrent requests.")
@option("--modes", default="plain,default", help=f"Modes of BUNDLE among {MODE_NAMES}.")
@option("--others", help=f"Other runtimes among {', '.join(RUNTIMES)}; NAME* = all formats.")
@option("--checkpoint", type=PATH, help="The model of BUNDLE as a Hugging Face checkpoint.")
@option("--gguf", type=PATH, help="The same as a GGUF file; without --checkpoint also for all others.")
@option("--work", type=PATH, default="build/benchmarks", help="Folder for environments, converted models and logs.")
@option("--setup", is_flag=True, help="Create missing environments and models first; downloads packages with pip.")
@option("--rounds", default=_DEFAULT.rounds, help="Measured rounds after a warm-up.")
@option("--threads", default=1, help="CPU threads of each runtime.")
@option("--seed", default=_DEFAULT.seed, help="Seed of random prompts and of intervals.")
@option("--json", "target", type=PATH, help="Also write the table to this file, as those of docs/results.")
@backend_option
def command(bundles: tuple[Path, ...], **values: Any) -> int:
    """Measure modes of each BUNDLE and other runtimes: one process each, in turns, on the CPU.

    decode answers --prompts; rows times steps of several rows; prefill times prompts; concurrent runs requests at once.
    Exit code 4 if a drafted answer differs from the plain one.
    """
    if not sys.platform.startswith("linux"):
        raise InputFault(f"benchmarks read CPU times from /proc: expected Linux, this is {sys.platform}")
    if values["target"] is not None:
        check_target(values["target"])
    if values["threads"] < 1:
        raise OptionFault(f"--threads is {values['threads']}: expected at least 1")
    numbers = {name: values[name] for name in ("max_tokens", "context", "requests", "rounds", "seed")}
    workload = Workload(
        tuple(values["workloads"].split(",")),
        rows=parse_counts("--rows", values["rows"]),
        prefill=parse_counts("--prefill", values["prefill"]),
        **numbers,
    )
    if "decode" in workload.names and values["prompts"] is None:
        raise OptionFault("the workload decode has no --prompts: expected a prompt file: add --prompts FILE")
    work = WorkFolder(values["work"], values["checkpoint"], values["gguf"])
    others = runtimes_named(values["others"]) if values["others"] else {}
    subjects = own_subjects(bundles, values["modes"].split(","), values["backend"])
    with stages() as on_progress:
        for runtime in others.values() if values["setup"] else ():
            set_up(work, runtime, on_progress)
        subjects += [other_subject(name, runtime, work) for name, runtime in others.items()]
        if "decode" in workload.names:
            kinds = [kind for kind in values["kinds"].split(",") if kind]
            with Runtime.open(bundles[0], threads=values["threads"], backend=values["backend"]) as opened:
                prompts = prompts_of(opened, values["prompts"], kinds, values["sample"], workload.max_tokens)
                workload = replace(workload, prompts=tuple(prompts), ends=opened.bundle.manifest.tokens.end)
        measured = measure(subjects, workload, values["threads"], work.logs, on_progress)
    table = results_table(measured, [subject.name for subject in subjects], workload.seed)
    machine = described_machine(values["threads"], measured.other_cores)
    failures = [f"- {name} failed: {reason}" for name, reason in measured.failed.items()]
    Report((f"{machine}; {measured.versions}.",), (table,), failures, {}).show()
    if values["target"] is not None:
        title = f"{', '.join(bundle.name for bundle in bundles)}: {', '.join(workload.names)}"
        write_result(values["target"], title, table, machine, measured.versions)
    return ACCURACY if any(one.identical is False for one in measured.found) else OK


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:], command))
