"""Benchmark: a bundle opened once, with a runtime per mode on the same engine, measured and summarized."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.manifest import Manifest
from spaceport.runtime.bundle import read_manifest
from spaceport.runtime.session import Runtime
from spaceport.tools.bench.compare.machine import this_machine
from spaceport.tools.bench.decode.measuring import measure
from spaceport.tools.bench.decode.modes import DEFAULT, PLAIN, DecodeMode, modes_for
from spaceport.tools.bench.decode.options import DecodeOptions
from spaceport.tools.bench.decode.replay import replay_runtime, synthetic_texts
from spaceport.tools.bench.decode.runtimes import mode_runtimes
from spaceport.tools.bench.decode.summary import DecodeReport, summarized
from spaceport.tools.verify.audit.prompts import TokenizedPrompt, read_prompts, tokenize_prompts

_REPLAY_MODES = (PLAIN, DEFAULT)


def benchmark(
    bundle: Path, file: Path | None, options: DecodeOptions, on_progress: Callable[[str], None]
) -> DecodeReport:
    """The speed of every mode on a prompt file, or with the acceptance rates of a replay."""
    read = None if file is None else read_prompts(file)[: options.limit]
    modes = _modes(read_manifest(bundle), options)
    on_progress("opening the bundle")
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
            on_progress(note)
        prompts: Sequence[TokenizedPrompt] = ()
        if read is not None and file is not None:
            prompts = tokenize_prompts(base, read, options.max_tokens, file)
        texts = None
        if options.replay is not None:
            texts, prompts = synthetic_texts(base, options, [len(prompt.tokens) for prompt in prompts])
        queue = options.requests * len(prompts)

        def open_runtime() -> Runtime:
            if texts is None:
                return Runtime(base.bundle, base.engine, base.max_seq_len, queue_limit=queue, costs=base.costs)
            return replay_runtime(base, texts, options.replay or (), queue)

        with mode_runtimes(modes, open_runtime) as runtimes:
            measured = measure(modes, runtimes, prompts, options, on_progress)
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
        most = manifest.drafts.max_tokens
        if len(options.replay) > most:
            raise OptionFault(
                f"--replay has {len(options.replay)} depths: expected at most {most}, the mask slots or heads of the bundle"
            )
        names = names or _REPLAY_MODES
        if unknown := [name for name in names if name not in _REPLAY_MODES]:
            raise OptionFault(f"--modes names {unknown[0]!r} with --replay: expected {' and '.join(_REPLAY_MODES)}")
    return modes_for(manifest, options.max_tokens, names, options.fixed)
