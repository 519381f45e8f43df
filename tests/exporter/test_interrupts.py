"""Interrupts: none is lost, none is delivered too early, and the previous handlers are restored."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from spaceport.exporter.interrupts import interrupts_deferred, interrupts_handled, interrupts_recorded

EACH = pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])


@EACH
def test_an_interrupt_is_deferred_until_the_block_has_ended(kind: signal.Signals) -> None:
    done: list[str] = []

    def work() -> None:
        with interrupts_deferred():
            os.kill(os.getpid(), kind)
            done.append("all of it")

    with interrupts_handled(lambda number: done.append(f"signal {number}")):
        work()
        assert done == ["all of it", f"signal {kind}"]


@EACH
def test_a_deferred_interrupt_is_delivered_after_an_error_as_well(kind: signal.Signals) -> None:
    received: list[int] = []

    def work() -> None:
        with interrupts_deferred():
            os.kill(os.getpid(), kind)
            raise ValueError("no")

    with interrupts_handled(received.append), pytest.raises(ValueError, match="no"):
        work()
    assert received == [kind]


@EACH
def test_a_recorded_interrupt_is_raised_when_the_block_ends(kind: signal.Signals) -> None:
    previous, recorded = signal.getsignal(kind), []

    def work() -> None:
        with interrupts_recorded() as received:
            os.kill(os.getpid(), kind)
            recorded.extend(received)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert recorded == [kind]
    assert signal.getsignal(kind) is previous


def test_outside_the_main_thread_interrupts_have_no_effect() -> None:
    found: list[list[int]] = []

    def work() -> None:
        with interrupts_recorded() as received:
            found.append(received)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [[]]
