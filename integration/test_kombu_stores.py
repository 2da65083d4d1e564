"""The adapter's tests, which run on the memory engine in `tests`, on real servers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from integration.stores import Server
from tests.kombu_rig import Broker
from tests.test_kombu_channel import *  # noqa: F403
from tests.test_kombu_transport import *  # noqa: F403
from tests.test_routing import *  # noqa: F403

pytestmark = pytest.mark.stores


@pytest.fixture
def broker(server: Server, prefix: str) -> Iterator[Broker]:
    broker = Broker(server.url(), prefix=prefix)
    yield broker
    broker.close()
