"""The watchdog reports a heartbeat that is too old, once, and none that is young enough or rests."""

from __future__ import annotations

from threading import Event

from spaceport.runtime.scheduling.watchdog import Heartbeat, Watchdog


def test_a_heartbeat_ages_until_the_next_beat_and_not_at_rest() -> None:
    now = 5.0
    heartbeat = Heartbeat(lambda: now)
    assert heartbeat.age is None
    heartbeat.beat()
    now = 7.5
    assert heartbeat.age == 2.5
    heartbeat.beat()
    assert heartbeat.age == 0
    heartbeat.rest()
    assert heartbeat.age is None


def test_a_heartbeat_that_is_too_old_is_reported_once() -> None:
    now = 0.0
    heartbeat = Heartbeat(lambda: now)
    heartbeat.beat()
    reported: list[float] = []
    seen = Event()
    watchdog = Watchdog(heartbeat, 0.01, lambda age: (reported.append(age), seen.set())[0])
    watchdog.start()
    assert not seen.wait(0.05)  # young enough
    now = 3.0
    assert seen.wait(60)
    watchdog._thread.join(60)
    assert reported == [3.0]


def test_a_stopped_watchdog_ends() -> None:
    watchdog = Watchdog(Heartbeat(), 1000, lambda age: None)
    watchdog.start()
    watchdog.stop()
    watchdog._thread.join(60)
    assert not watchdog._thread.is_alive()
