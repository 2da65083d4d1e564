"""What only a store in memory can show."""

from __future__ import annotations

import pytest
from kombu import Consumer, Queue

from tests.kombu_rig import Broker, engine_of


def test_a_store_that_is_gone_is_a_connection_error(broker: Broker) -> None:
    connection = broker.open()
    channel = connection.channel()
    Consumer(channel, [Queue("jobs")], callbacks=[lambda body, message: None]).consume()
    engine_of(connection).kill()  # type: ignore[attr-defined]
    with pytest.raises(connection.connection_errors):
        connection.drain_events(timeout=1)
    assert connection.transport.broken
