"""The broker's tests, which run on the memory engine in `tests`, on a server of each store."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from integration.dramatiq_worker import dramatiq_place
from integration.stores import Server
from tests.dramatiq_rig import Brokers
from tests.test_dramatiq_broker import *  # noqa: F403

pytestmark = pytest.mark.stores


@pytest.fixture
def brokers(server: Server, prefix: str) -> Iterator[Brokers]:
    made = Brokers(*dramatiq_place(server), prefix=prefix)
    yield made
    made.close()
