"""Dramatiq on Redis Streams and NATS JetStream: give `dramatiq.set_broker` one of these brokers, change nothing else.

    import dramatiq
    from streambroker.dramatiq import RedisStreamsBroker

    dramatiq.set_broker(RedisStreamsBroker(url="redis://localhost:6379/0"))
"""

from __future__ import annotations

from .broker import JetStreamBroker, RedisStreamsBroker, StreamBroker
from .consumer import StreamConsumer, StreamMessage
from .failures import DeliveryLimitExceeded

__all__ = [
    "DeliveryLimitExceeded", "JetStreamBroker", "RedisStreamsBroker", "StreamBroker", "StreamConsumer",
    "StreamMessage"]
