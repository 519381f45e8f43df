"""Benchmark: a bundle opened once, with a runtime for each mode on the same engine, and everything measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.manifest import Manifest
from spaceport.runtime.bundle import read_manifest
from spaceport.runtime.costs import StepCosts
from spaceport.runtime.session import Runtime
from spaceport.tools.bench.compare.machine import this_machine
from spaceport.tools.bench.decode.measuring import measure
from spaceport.tools.bench.decode.modes import DEFAULT, PLAIN, DecodeMode, modes_for
from spaceport.tools.bench.decode.options import DecodeOptions
from spaceport.tools.bench.decode.replay import MadeUpTexts, made_up_texts, replay_runtime
from spaceport.tools.bench.decode.summary import DecodeReport, summarized
from spaceport.tools.verify.audit.prompts import TokenizedPrompt, read_prompts, tokenize_prompts

_REPLAYED = (PLAIN, DEFAULT)


def benchmark(bundle: Path, file: Path | None, options: DecodeOptions, stage: Callable[[str], None]) -> DecodeReport:
    """What drafts are worth on a file of prompts, or with the acceptance rates of a replay."""
    asked = None if file is None else read_prompts(file)[: options.limit]
    modes = _modes(read_manifest(bundle), options)
    stage("opening the bundle")
    with Runtime.open(
        bundle,
        backend=options.backend,
        max_seq_len=options.max_seq_len,
        max_requests=options.requests,
        threads=options.threads,
        trust_engines=options.trust_engines,
    ) as base:
        engine = f"{type(base.engine).__name__}, {base.engine.device}"
        for note in base.notes:
            stage(note)
        prompts: Sequence[TokenizedPrompt] = ()
        if asked is not None and file is not None:
            prompts = tokenize_prompts(base, asked, options.max_tokens, file)
        texts = None
        if options.replay is not None:
            texts, prompts = made_up_texts(base, options, [len(one.tokens) for one in prompts])
        with _runtimes(base, modes, options, texts, len(prompts)) as runtimes:
            measured = measure(modes, runtimes, prompts, options, stage)
    return DecodeReport(
        bundle.absolute().name,
        engine,
        this_machine(),
        options,
        len(prompts),
        summarized(measured, modes, prompts, options),
        tuple(measured.differences),
    )


def _modes(manifest: Manifest, options: DecodeOptions) -> tuple[DecodeMode, ...]:
    names = options.modes
    if options.replay is not None:
        most = manifest.max_mask_slots
        if len(options.replay) > most:
            raise OptionFault(
                f"--replay has {len(options.replay)} depths: expected at most {most}, the mask slots of the bundle"
            )
        names = names or _REPLAYED
        if unknown := [name for name in names if name not in _REPLAYED]:
            raise OptionFault(f"--modes names {unknown[0]!r} with --replay: expected {' and '.join(_REPLAYED)}")
    return modes_for(manifest, options.max_tokens, names, options.fixed)


@contextmanager
def _runtimes(
    base: Runtime, modes: Sequence[DecodeMode], options: DecodeOptions, texts: MadeUpTexts | None, prompts: int
) -> Iterator[dict[str, Runtime]]:
    """A runtime for each mode, all on one engine: they share nothing that they learn of costs and acceptance."""
    found: dict[str, Runtime] = {}
    queue = options.requests * prompts
    try:
        for mode in modes:
            costs = StepCosts(base.costs.table, fixed=base.costs.fixed)
            if texts is None:
                found[mode.name] = Runtime(base.bundle, base.engine, base.max_seq_len, queue_limit=queue, costs=costs)
            else:
                found[mode.name] = replay_runtime(base, texts, options.replay or (), queue, costs)
        yield found
    finally:
        for runtime in found.values():
            runtime.close()
