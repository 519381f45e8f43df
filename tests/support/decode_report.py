"""Decode report: a report of the decode benchmark from given statistics."""

from __future__ import annotations

from spaceport.runtime.decode.statistics import Statistics
from spaceport.runtime.decoding import Decoding
from spaceport.tools.bench.compare.machine import Machine
from spaceport.tools.bench.decode.measuring import Difference, Measured, MeasuredCompletion
from spaceport.tools.bench.decode.modes import PLAIN, DecodeMode
from spaceport.tools.bench.decode.options import DecodeOptions
from spaceport.tools.bench.decode.summary import DecodeReport, summarized
from spaceport.tools.verify.audit.prompts import TokenizedPrompt

MODES = (DecodeMode(PLAIN, Decoding(), PLAIN), DecodeMode("default", Decoding(), PLAIN))
PROMPTS = (TokenizedPrompt(2, (1, 2, 3)), TokenizedPrompt(7, (4,)))
OPTIONS = DecodeOptions(rounds=2, temperatures=(0.0,))
# Seconds of each completion by mode, round and prompt; the second prompt's completion is empty in both modes.
SECONDS = {PLAIN: ((4.0, 1.0), (6.0, 1.0)), "default": ((2.0, 1.0), (2.0, 1.0))}
DRAFTED = {
    "drafted_by_depth": [4, 2],
    "accepted_by_depth": [3, 1],
    "drafted_by_source": {"mask": 5, "both": 1},
    "accepted_by_source": {"mask": 3, "both": 1},
}


def decode_measured(tokens_of_first: int = 12) -> Measured:
    found = Measured()
    for mode, rounds in SECONDS.items():
        for number, row in enumerate(rounds, 1):
            found.seconds[mode, 0.0, number] = sum(row)
            for prompt, seconds in enumerate(row):
                tokens = 0 if prompt else tokens_of_first
                statistics = Statistics(
                    steps=12 if mode == PLAIN else 8,
                    tokens=tokens,
                    engine_seconds=0.75 * seconds,
                    outside_seconds=0.25 * seconds,
                    first_token_seconds=seconds / 10,
                    seconds=seconds + 5,
                    waiting_seconds=5.0,
                    **({} if prompt or mode == PLAIN else DRAFTED),  # type: ignore[arg-type]
                )
                found.completions.append(MeasuredCompletion(mode, 0.0, number, prompt, statistics))
    found.compared["default", 0.0] = 6
    return found


def decode_report(different: int = 0, options: DecodeOptions = OPTIONS, tokens_of_first: int = 12) -> DecodeReport:
    found = decode_measured(tokens_of_first)
    found.different["default", 0.0] = different
    found.differences += [Difference("default", PLAIN, 0.0, 1, 7, (0,), 4, None, 99)] * different
    machine = Machine("a CPU", "model 1", 2, (), "a system")
    summaries = summarized(found, MODES, PROMPTS, options)
    return DecodeReport("x.bundle", "Engine, cpu", machine, options, 2, summaries, tuple(found.differences))
