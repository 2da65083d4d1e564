"""Fixtures of the tests that need no server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kombu_rig import Broker


@pytest.fixture
def broker() -> Iterator[Broker]:
    broker = Broker()
    yield broker
    broker.close()
