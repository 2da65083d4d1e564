"""Fixtures of the tests that need no server."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.kombu_rig import Broker


@pytest.fixture
def broker() -> Iterator[Broker]:
    broker = Broker()
    yield broker
    broker.close()


@pytest.fixture(autouse=True)
def root_level() -> None:
    """A Celery worker inside a test process sets the level of the root logger for all that comes after it."""
    logging.getLogger().setLevel(logging.WARNING)
