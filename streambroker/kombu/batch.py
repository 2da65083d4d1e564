"""Publishing in batches (`Producer.batch`, Kombu 5.7 up): one call of the store for each queue and flush."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

try:
    from kombu.exceptions import BatchPublishError
except ImportError:
    from kombu.exceptions import OperationalError as BatchPublishError

if TYPE_CHECKING:
    from ..message import Message
    from .channel import Channel


class PublishBatch:
    """Collects what one thread publishes. After a flush that failed nothing is known about its messages, and the batch
    cannot be used any more. Broadcasts go out at once."""

    def __init__(self, channel: Channel, max_size: int) -> None:
        self.channel = channel
        self.max_size = max_size
        self._waiting: dict[tuple[str, bool], list[Message]] = {}
        self._size = 0
        self._ended = ""

    def publish(self, message: dict[str, Any], exchange: str = "", routing_key: str = "", mandatory: bool = False,
                **kwargs: Any) -> None:
        self._check()
        wanted = self.channel.shared.publisher.publish(message, exchange or "", routing_key or "", self._add)
        if not wanted and mandatory:
            self.channel.returned(message, exchange, routing_key)
        if self._size >= self.max_size:
            self.flush()

    def flush(self) -> None:
        """Raises BatchPublishError when it is not known what was stored."""
        self._check()
        waiting, self._waiting, self._size = self._waiting, {}, 0
        shared = self.channel.shared
        try:
            for (queue, create), messages in waiting.items():
                if not shared.engine.publish(queue, messages, create=create) and not create:
                    shared.publisher.unroutable.gone(queue)
        except Exception as error:
            self._ended = f"an earlier flush failed: {error}"
            raise BatchPublishError("publishing the batch failed, some of it may be stored") from error

    def discard(self) -> None:
        self._waiting, self._size = {}, 0
        self._ended = "it was discarded"

    def close(self) -> None:
        self._waiting, self._size = {}, 0
        self._ended = self._ended or "it was closed"

    def _add(self, queue: str, create: bool, message: Message) -> None:
        self._waiting.setdefault((queue, create), []).append(message)
        self._size += 1

    def _check(self) -> None:
        if self._ended:
            raise BatchPublishError(f"this batch cannot be used any more: {self._ended}")
