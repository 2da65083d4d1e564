"""What the store's errors are to Dramatiq: its worker goes on after a BrokerConnectionError, and only after that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dramatiq.errors import BrokerError, ConnectionClosed

from ..errors import StreambrokerError


class DeliveryLimitExceeded(BrokerError):
    """Stuffed into a message that became a dead letter since each process that ran it died."""

    def __init__(self, message: str) -> None:
        self.message = message


@contextmanager
def unavailable() -> Iterator[None]:
    """Any error of the store is ConnectionClosed: the worker would give the message, or the consumer, up."""
    try:
        yield
    except StreambrokerError as error:
        raise ConnectionClosed(str(error)) from error
