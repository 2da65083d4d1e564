"""When whoever drives a consumer of the Redis Streams engine hears of settlements."""

from __future__ import annotations

import time

from streambroker.engines.redis_streams.settles import WINDOW, WINDOW_TIME, Outbox, Settle


def done(number: int, mode: str = "done") -> Settle:
    return Settle(mode, "jobs", f"0:{number}", "me")


def test_the_first_of_a_group_and_the_one_that_fills_it_are_told() -> None:
    """Each other one would wake the driver for nothing; after he took them a first one is told again."""
    outbox = Outbox()
    for _ in range(3):
        assert [outbox.put(done(number)) for number in range(WINDOW)] == [True, *[False] * (WINDOW - 2), True]
        assert outbox.due(time.monotonic()) == 0.0
        assert len(outbox.take()) == WINDOW


def test_few_wait_for_the_window() -> None:
    outbox = Outbox()
    outbox.put(done(1))
    due = outbox.due(time.monotonic())
    assert due is not None
    assert 0 < due <= WINDOW_TIME


def test_what_is_no_acknowledgement_goes_at_once() -> None:
    outbox = Outbox()
    outbox.put(done(1))
    assert outbox.put(done(2, "nack"))
    assert outbox.due(time.monotonic()) == 0.0
    outbox.take()
    assert outbox.due(time.monotonic()) is None


def test_what_was_not_answered_comes_first_again() -> None:
    outbox = Outbox()
    outbox.put(done(1))
    batch = outbox.take()
    outbox.put(done(2))
    outbox.give_back(batch)
    assert [settle.id for settle in outbox.take()] == ["0:1", "0:2"]
