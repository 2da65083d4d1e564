"""Messages that nothing wanted: counted, and told without flooding the log."""

from __future__ import annotations

import logging
import time

logger = logging.getLogger(__name__)

#: seconds between two warnings about the same place, and how many places are remembered
_PAUSE, _PLACES = 60.0, 1000


class Unroutable:
    """`count` is how many messages had no queue to go to since the process started."""

    def __init__(self) -> None:
        self.count = 0
        self._told: dict[tuple[str, str], float] = {}

    def note(self, exchange: str, routing_key: str, *, live: bool) -> None:
        self.count += 1
        if self._should_tell((exchange, routing_key)):
            logger.warning(
                "a message to exchange %r with routing key %r is dropped: no queue is bound for it%s. Declare the "
                "queue before publishing, or name a queue for such messages by the transport option deadletter_queue",
                exchange, routing_key, "; only those who listen right now, if any, get it" if live else "")

    def gone(self, queue: str) -> None:
        """A queue that comes and goes, such as a reply queue, went before the message came."""
        self.count += 1
        logger.debug("a message to queue %r is dropped: the queue is gone", queue)

    def _should_tell(self, place: tuple[str, str]) -> bool:
        now = time.monotonic()
        if now - self._told.get(place, float("-inf")) < _PAUSE:
            return False
        if len(self._told) >= _PLACES:
            self._told.clear()
        self._told[place] = now
        return True
