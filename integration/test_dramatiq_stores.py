"""The broker's tests, which run on the memory engine in `tests`, on a server of each store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from integration.dramatiq_worker import dramatiq_place
from tests.dramatiq_rig import Brokers
from tests.test_dramatiq_broker import *  # noqa: F403


@pytest.fixture(params=["valkey", "nats"])
def brokers(request: pytest.FixtureRequest, servers: Callable[[str], Any], prefix: str) -> Iterator[Brokers]:
    made = Brokers(*dramatiq_place(servers(request.param)), prefix=prefix)
    yield made
    made.close()
