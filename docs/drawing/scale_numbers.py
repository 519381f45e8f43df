"""Scale numbers: the tables of docs/scale.md, computed from what one replica was measured to need.

Run `python docs/drawing/scale_numbers.py`; `--help` lists the measured values, to put in those of other machines and models.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FLEETS = (10, 100, 1000)  # replicas
VIRTUAL_NODES = 100  # of a replica on the ring, as Ray's ConsistentHashRouter has them
FALLBACKS = 2  # replicas that it tries next
TRIALS = {10: 200, 100: 20, 1000: 4}


@dataclass(frozen=True)
class Placement:
    """Where running sessions land on a ring of replicas, as shares of all sessions."""

    busiest: float  # sessions whose first choice is the busiest replica
    elsewhere: float  # share that runs on one of the next replicas, since the first one has no free slot
    waiting: float  # share that finds all of them full


def placed(replicas: int, slots: int, load: float, random: np.random.Generator) -> Placement:
    """One random placement of as many sessions as fill a share of all slots."""
    points = random.integers(0, 2**63, size=replicas * VIRTUAL_NODES)
    order = np.argsort(points)
    points, owners = points[order], np.repeat(np.arange(replicas), VIRTUAL_NODES)[order]
    sessions = random.integers(0, 2**63, size=int(replicas * slots * load))
    starts = np.searchsorted(points, sessions)
    used = np.zeros(replicas, int)
    elsewhere = waiting = 0
    for start in starts:
        for rank, replica in enumerate(ranked(owners, int(start))):
            if used[replica] < slots:
                used[replica] += 1
                elsewhere += rank > 0
                break
        else:
            waiting += 1
    first = np.bincount(owners[starts % owners.size], minlength=replicas)
    return Placement(float(first.max()), elsewhere / sessions.size, waiting / sessions.size)


def ranked(owners: NDArray[np.int64], start: int) -> Iterator[int]:
    """The replica that owns a point of the ring, then the next other ones."""
    seen: list[int] = []
    for step in range(owners.size):
        replica = int(owners[(start + step) % owners.size])
        if replica not in seen:
            seen.append(replica)
            yield replica
        if len(seen) > FALLBACKS:
            return


def show_placements(slots: int) -> None:
    """Print how evenly session affinity spreads sessions."""
    random = np.random.default_rng(1)
    print("| replicas | slots in use | busiest replica is first choice of | on a neighbour | all three full |")
    print("|---:|---:|---:|---:|---:|")
    for replicas in FLEETS:
        for load in (0.5, 0.7, 0.9):
            found = [placed(replicas, slots, load, random) for _ in range(TRIALS[replicas])]
            busiest, elsewhere, waiting = (
                float(np.mean([getattr(one, name) for one in found])) for name in ("busiest", "elsewhere", "waiting")
            )
            print(f"| {replicas:,} | {load:.0%} | {busiest:.1f} sessions | {elsewhere:.1%} | {waiting:.1%} |")


def show_start(given: argparse.Namespace) -> None:
    """Print how long all replicas need from an empty machine to the first token."""
    opening = given.gigabytes / given.hash_rate + given.gigabytes * given.session_seconds + given.import_seconds
    print("| replicas | data | one object store | a copy on each machine before | peers send on |")
    print("|---:|---:|---:|---:|---:|")
    for replicas in FLEETS:
        data = replicas * given.gigabytes
        direct = max(given.gigabytes / given.machine_rate, data / given.store_rate)
        peers = given.gigabytes / given.machine_rate * (1 + np.log2(replicas) / given.pieces)
        cells = (f"{seconds + opening:.0f} s" for seconds in (direct, 0.0, peers))
        print(f"| {replicas:,} | {data:,.0f} GB | {' | '.join(cells)} |")


def show_proxies(given: argparse.Namespace) -> None:
    """Print how many proxies pass on what replicas generate when 70% of their slots are in use."""
    print("| replicas | streams | events/s | proxies |")
    print("|---:|---:|---:|---:|")
    for replicas in FLEETS:
        streams = replicas * given.slots * 0.7
        events = streams * given.steps
        print(f"| {replicas:,} | {streams:,.0f} | {events:,.0f} | {np.ceil(events / given.proxy_events):,.0f} |")


def show_metrics(given: argparse.Namespace) -> None:
    """Print what a Prometheus server has to take."""
    print("| replicas | series | samples/s | bytes/s |")
    print("|---:|---:|---:|---:|")
    for replicas in FLEETS:
        series = replicas * given.series
        print(f"| {replicas:,} | {series:,} | {series / 15:,.0f} | {replicas * given.scrape_bytes / 15:,.0f} |")


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name, value, text in (
        ("--slots", 8, "requests that decode at a time in a replica"),
        ("--gigabytes", 8.0, "size of the bundle"),
        ("--machine-rate", 1.25, "GB/s that one machine loads"),
        ("--store-rate", 12.5, "GB/s that the object store sends in all"),
        ("--pieces", 8, "pieces in which peers pass a file on"),
        ("--hash-rate", 1.45, "GB/s at which hashes are verified"),
        ("--session-seconds", 1.8, "seconds per GB until the engine is ready"),
        ("--import-seconds", 0.5, "seconds of the process before that"),
        ("--steps", 10.0, "steps per second of a stream, each of which is an event"),
        ("--proxy-events", 1000, "events per second that one proxy passes on"),
        ("--series", 152, "time series of a replica"),
        ("--scrape-bytes", 2400, "compressed bytes of a scrape"),
    ):
        parser.add_argument(name, type=type(value), default=value, help=text)
    given = parser.parse_args()
    show_placements(given.slots)
    for show in (show_proxies, show_start, show_metrics):
        print()
        show(given)


if __name__ == "__main__":
    main()
