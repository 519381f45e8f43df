"""Interrupts: none is lost, none comes too early, and the handlers before are those after."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from spaceport.exporter.interrupts import interrupts_deferred, interrupts_handled, interrupts_recorded

EACH = pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])


@EACH
def test_an_interrupt_waits_until_the_block_has_ended(kind: signal.Signals) -> None:
    done: list[str] = []

    def work() -> None:
        with interrupts_deferred():
            os.kill(os.getpid(), kind)
            done.append("all of it")

    with interrupts_handled(lambda number: done.append(f"signal {number}")):
        work()
        assert done == ["all of it", f"signal {kind}"]


@EACH
def test_an_interrupt_that_waits_comes_after_a_fault_as_well(kind: signal.Signals) -> None:
    came: list[int] = []

    def work() -> None:
        with interrupts_deferred():
            os.kill(os.getpid(), kind)
            raise ValueError("no")

    with interrupts_handled(came.append), pytest.raises(ValueError, match="no"):
        work()
    assert came == [kind]


@EACH
def test_an_interrupt_is_noted_and_comes_when_the_block_ends(kind: signal.Signals) -> None:
    kept, came_first = signal.getsignal(kind), []

    def work() -> None:
        with interrupts_recorded() as came:
            os.kill(os.getpid(), kind)
            came_first.extend(came)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert came_first == [kind]
    assert signal.getsignal(kind) is kept


def test_a_thread_that_cannot_be_interrupted_works_as_well() -> None:
    found: list[list[int]] = []

    def work() -> None:
        with interrupts_recorded() as came:
            found.append(came)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [[]]
