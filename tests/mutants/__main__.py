"""Mutants as a command: python -m mutants puts kept faults into the product, and says which ones no test notices."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import Literal

import click

from mutants.mutations import Mutation, Site, drawn, located, mutate
from mutants.recorder import FAILURES, copied, environment, record, tests_of
from support.paths import ROOT

Outcome = Literal["caught", "missed", "timed out", "not reached"]

KEPT = Path(__file__).with_name("kept.json")
MOST_TESTS = 400  # that are run for one mutation, the quickest ones
MOST_SECONDS = 240  # for them; a time-out shows nothing on a busy machine


@click.command()
@click.option("--work", type=click.Path(path_type=Path), default=Path("build/mutants"), help="Folder for the copies.")
@click.option("--draw", type=int, metavar="N", help="Draw mutations until N are caught, and keep these.")
@click.option("--seed", type=int, default=1, show_default=True, help="Of --draw.")
@click.option("--jobs", type=int, default=2, show_default=True, help="Test processes at a time.")
@click.option("--again", is_flag=True, help="Use what the last run recorded about the tests.")
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def main(work: Path, draw: int | None, seed: int, jobs: int, again: bool, options: tuple[str, ...]) -> None:
    """Run the tests that reach each of the kept mutations, until one fails; OPTIONS choose the tests as for pytest.

    Exits with 1 if a mutation is not caught, or if its expression is gone.
    """
    work = work.resolve()
    sites, gone = (drawn(ROOT, seed)[: 8 * draw], 0) if draw else _kept()
    if again and not (work / "reached" / "mutations.json").exists():
        raise click.UsageError(f"--again: {work} has no recorded tests: run without --again first")
    if not again:
        click.echo("mutants: running the tests once, to record what they reach (minutes)")
        record(copied(ROOT, work / "recorded"), sites, work / "reached", options, jobs)
    caught, rest = list[Mutation](), list[Mutation]()
    tests = tests_of(work / "reached")
    with _tried(sites, tests, work, jobs, draw) as outcomes:
        for site, outcome, reason in outcomes:
            mutation = site.mutation
            if outcome == "caught":
                caught.append(mutation)
            elif outcome != "not reached" or not draw:
                rest.append(mutation)
            if outcome != "not reached" or not draw:
                place = f"{mutation.file}:{site.line} {mutation.function}"
                click.echo(f"{outcome}: {place}: {mutation.original} -> {mutation.mutated}{reason}")
    click.echo(
        f"mutants: {len(caught)} caught, {len(rest)} not caught" + (f", {gone} gone: draw others" if gone else "")
    )
    if draw:
        text = json.dumps(
            [asdict(mutation) for mutation in sorted(caught, key=lambda m: (m.file, m.function))], indent=1
        )
        KEPT.write_text(text + "\n", "utf-8")
    elif rest or gone:
        sys.exit(1)


def _kept() -> tuple[list[Site], int]:
    """The kept mutations, and how many of them have no place in the sources any more."""
    mutations = [Mutation(**fields) for fields in json.loads(KEPT.read_text("utf-8"))]
    found = [(mutation, located(ROOT, mutation)) for mutation in mutations]
    for mutation, site in found:
        if site is None:
            click.echo(f"gone: {mutation.file} {mutation.function}: {mutation.original}")
    sites = [site for _, site in found if site is not None]
    return sites, len(found) - len(sites)


@contextmanager
def _tried(
    sites: Sequence[Site], tests: dict[Mutation, list[str]], work: Path, jobs: int, enough: int | None
) -> Iterator[Iterator[tuple[Site, Outcome, str]]]:
    """The outcome of each mutation as it comes, some at a time in copies of their own."""
    copies = SimpleQueue[Path]()
    for number in range(jobs):
        copies.put(copied(ROOT, work / f"mutated-{number}"))
    seen = 0

    def tried(site: Site) -> tuple[Site, Outcome, str]:
        nonlocal seen
        if enough is not None and seen >= enough:
            return site, "not reached", ""
        copy = copies.get()
        try:
            result = _try(copy, site, tests.get(site.mutation, [])[:MOST_TESTS])
        finally:
            copies.put(copy)
        seen += result[1] == "caught"
        return result

    with ThreadPoolExecutor(jobs) as pool:
        waiting = [pool.submit(tried, site) for site in sites]
        yield (done.result() for done in as_completed(waiting))


def _try(copy: Path, site: Site, tests: list[str]) -> tuple[Site, Outcome, str]:
    begin = time.monotonic()
    left = tests
    while left:
        original = mutate(copy, site)
        try:
            failed = _first_failure(copy, left)
        except subprocess.TimeoutExpired:
            return site, "timed out", f" ({MOST_SECONDS} s)"
        finally:
            (copy / site.mutation.file).write_bytes(original)
        if failed is None:
            return site, "missed", f" ({time.monotonic() - begin:.0f} s)"
        if _first_failure(copy, [failed]) is None:
            return site, "caught", f" ({failed}) ({time.monotonic() - begin:.0f} s)"
        # it fails without the mutation too: it shows nothing, and a file that cannot be imported fails as a whole
        left = [test for test in left if test != failed and not test.startswith(f"{failed}::")]
    return site, "missed" if tests else "not reached", ""


def _first_failure(copy: Path, tests: list[str]) -> str | None:
    """The first of these tests that fails in a copy, or the file that cannot be imported; None if all pass."""
    chosen, failures = copy / "chosen_tests", copy / "failures"
    chosen.write_text("\n".join(tests) + "\n")
    failures.unlink(missing_ok=True)
    for cached in copy.rglob("__pycache__"):
        shutil.rmtree(cached, ignore_errors=True)
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "mutants.recorder", "--unchanged", f"@{chosen}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options],
        cwd=copy,
        env={**environment(copy), "PYTHONDONTWRITEBYTECODE": "1", FAILURES: str(failures)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        process.wait(MOST_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    if process.returncode == 0:
        return None
    return failures.read_text().splitlines()[0] if failures.exists() else tests[0]


if __name__ == "__main__":
    main()
