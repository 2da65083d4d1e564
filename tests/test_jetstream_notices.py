"""A connection that comes and goes costs few lines, and one that stays away is told of."""

from __future__ import annotations

import logging

import pytest

from streambroker.engines.jetstream import notices
from streambroker.engines.jetstream.notices import Notices


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, to be changed."""
    time = [1000.0]
    monkeypatch.setattr(notices.time, "monotonic", lambda: time[0])
    return time


def test_the_first_loss_and_its_end_are_told(caplog: pytest.LogCaptureFixture, now: list[float]) -> None:
    told = Notices()
    with caplog.at_level(logging.INFO):
        told.connected("connected to a", again=False)
        told.lost("lost a")
        told.connected("connected to a", again=True)
    assert [(each.levelname, each.message) for each in caplog.records] == [
        ("INFO", "connected to a"), ("WARNING", "lost a; connecting again"), ("WARNING", "connected to a again")]


def test_many_are_counted(caplog: pytest.LogCaptureFixture, now: list[float]) -> None:
    told = Notices()
    with caplog.at_level(logging.INFO):
        for _ in range(60):
            told.lost("lost a")
            told.connected("connected to a", again=True)
            now[0] += 1
    assert [each.message for each in caplog.records] == [
        "lost a; connecting again", "connected to a again",
        "lost a; connecting again (and 29 times since that was said last)", "connected to a again"]


def test_one_that_stays_away_is_told_of(caplog: pytest.LogCaptureFixture, now: list[float]) -> None:
    told = Notices()
    with caplog.at_level(logging.INFO):
        told.lost("lost a")
        told.connected("connected to a", again=True)
        told.lost("lost a")
        told.away()
        assert len(caplog.records) == 2
        now[0] += notices.LASTS
        told.away()
        told.away()
        told.connected("connected to b", again=True)
    assert [each.message for each in caplog.records][2:] == [
        "lost a; connecting again", "connected to b again"]
