"""Report: every runtime beside the first one, as a table and as a file of docs/results."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.measuring import ROOT, Measurement, Measurements
from spaceport.runtime.backends.machine import cpu_class, cpu_name, usable_cpus
from spaceport.tools.bench.decode import Speedup, speedup_of
from spaceport.tools.bench.report import Table, cell_text

ALL = "all"  # case of the rows over all kinds of prompts
LOSS = 0.97  # a prompt with a lower ratio counts as a loss
Samples = dict[int, list[float]]  # by prompt or round: the values of its rounds


def results_table(measured: Measurements, subjects: Sequence[str], seed: int) -> Table:
    """A row for each workload, case and subject; ratios are speeds relative to the first subject in the same turns."""
    first = subjects[0]
    columns: tuple[str, ...] = ("workload", "case", "runtime", "median", "best", "unit")
    columns += (f"ratio to {first} (95 % interval)", "worst prompt", f"prompts below {LOSS}")
    columns += ("tokens per step", "identical outputs", "ms to the first token", "ms for each further token")
    rows = []
    for workload, case, found in _cases(measured.found):
        by_subject = {name: [one for one in found if one.subject == name] for name in subjects}
        reference = samples_of(by_subject[first])
        for name in (name for name in subjects if by_subject[name]):
            own, inverse = by_subject[name], workload == "rows"
            ratios = ratios_of(samples_of(own), {} if name == first else reference, inverse)
            speed = median(median(values) for values in samples_of(own).values())
            best = (min if inverse else max)(one.value for one in own)
            cells = (speed, best, "ms" if inverse else "tokens/s", *_ratio(ratios, workload == "decode", seed))
            rows.append((workload, case, name, *cells, _tokens_per_step(own), _identical(own), *_waits(own)))
    return Table("", columns, rows)


def _cases(found: Sequence[Measurement]) -> Iterator[tuple[str, str, list[Measurement]]]:
    """The measurements by workload and case, those of several kinds of prompts also together."""
    cases = defaultdict[tuple[str, str], list[Measurement]](list)
    for one in found:
        cases[one.workload, one.case].append(one)
    kinds = [key for key in cases if key[0] == "decode"]
    if len(kinds) > 1:
        yield "decode", ALL, [one for key in kinds for one in cases[key]]
    yield from ((*key, measurements) for key, measurements in cases.items())


def samples_of(found: Sequence[Measurement]) -> Samples:
    """The values of a subject by sample."""
    samples = defaultdict[int, list[float]](list)
    for one in found:
        samples[one.sample].append(one.value)
    return samples


def ratios_of(own: Samples, reference: Samples, inverse: bool) -> Samples:
    """Speed ratios by sample and round; a sample that a subject has not measured in every round is left out."""
    return {
        sample: [other / one if inverse else one / other for one, other in zip(values, reference[sample], strict=True)]
        for sample, values in own.items()
        if len(values) == len(reference.get(sample, ()))
    }


def _ratio(ratios: Samples, prompts: bool, seed: int) -> tuple[Speedup | str | None, str | None, int | None]:
    """The ratio over all samples, and of prompts the worst one and the number of losses."""
    if (speedup := speedup_of(ratios, seed)) is None:
        return None, None, None
    shown = speedup if speedup.prompts > 1 else f"{speedup.mean:.2f}"  # the interval of one sample says nothing
    if not prompts:
        return shown, None, None
    losses = sum(np.exp(np.median(np.log(values))) < LOSS for values in ratios.values())  # as the worst one
    return shown, f"{speedup.worst:.2f} (line {speedup.worst_line})", losses


def _tokens_per_step(own: Sequence[Measurement]) -> float | None:
    steps = sum(one.steps for one in own)
    return sum(one.tokens for one in own) / steps if steps else None


def _waits(own: Sequence[Measurement]) -> tuple[float, float] | tuple[None, None]:
    """Milliseconds to the first token and for each further one: medians over all answers of more than one token."""
    if not (answers := [one for one in own if one.first and one.tokens > 1]):
        return None, None
    further = median((one.tokens / one.value - one.first) / (one.tokens - 1) for one in answers)
    return median(one.first for one in answers) * 1e3, further * 1e3


def _identical(own: Sequence[Measurement]) -> str | None:
    compared = [one.identical for one in own if one.identical is not None]
    return f"{sum(compared)} of {len(compared)}" if compared else None


def described_machine(threads: int, others: float | None) -> str:
    """The CPU and its class, and how busy it was."""
    busy = "" if others is None else f", other processes used {others:.2f} cores"
    return f"{cpu_name()} ({cpu_class()}), {usable_cpus()} cores, {threads} threads{busy}"


def write_result(path: Path, title: str, table: Table, machine: str, versions: str, module: str = "benchmarks") -> None:
    """Write a table as a file of docs/results, with what was run, where and when."""
    cells = [["" if cell is None else cell_text(cell) for cell in row] for row in table.rows]
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    data = {"title": title, "columns": list(table.columns), "rows": cells}
    data |= {"command": shlex.join(["python", "-m", module, *sys.argv[1:]]), "machine": machine}
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    data |= {"versions": versions, "commit": commit, "date": date.today().isoformat()}
    path.write_text(json.dumps(data, indent=2) + "\n", "utf-8")
