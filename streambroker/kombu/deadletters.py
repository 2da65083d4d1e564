"""Rejected for good: to the dead-letter exchange of the queue when it names one, else to the store's dead letters."""

from __future__ import annotations

import logging
import sys
import time
import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import StreambrokerError
from ..message import DeadLetter, Delivery, Message
from .message import COUNT_HEADER, REDELIVERED_HEADER, read_head
from .message import Message as KombuMessage

if TYPE_CHECKING:
    from .qos import Held
    from .shared import SharedEngine

logger = logging.getLogger(__name__)

EXCHANGE, ROUTING_KEY = "x-dead-letter-exchange", "x-dead-letter-routing-key"

#: Celery's functions that reject, to what they mean by it
_CELERY_REASONS = {
    "on_unknown_task": "unknown task",
    "on_invalid_task": "invalid task message",
    "on_unknown_message": "not a task message",
}


class DeadLetterExchanges:
    """Dead-letter exchanges of the queues that this process consumes. Thread-safe."""

    def __init__(self, shared: SharedEngine) -> None:
        self._shared = shared
        self._targets: dict[str, tuple[str, str | None]] = {}

    def learn(self, queue: str, arguments: Mapping[str, Any]) -> None:
        """From a queue's arguments. From then on messages that the store convicts (delivery limit) follow too."""
        if EXCHANGE not in arguments:
            self._targets.pop(queue, None)
            return
        self._targets[queue] = (str(arguments[EXCHANGE] or ""), arguments.get(ROUTING_KEY))
        self._shared.engine.forward_dead_letters(queue, self._forward)

    def bury(self, held: Held, reason: str) -> None:
        """End one delivery. Never raises."""
        delivery = held.delivery
        if delivery.queue in self._targets and self._send(delivery.queue, delivery.message, "rejected", delivery.count):
            held.settler.ack(delivery)
        else:
            held.settler.dead_letter(delivery, reason)

    def _forward(self, dead: DeadLetter) -> bool:
        reason = "delivery_limit" if "delivery limit" in dead.reason else "rejected"
        return dead.queue in self._targets and self._send(dead.queue, dead.message, reason, dead.count)

    def _send(self, queue: str, message: Message, reason: str, count: int) -> bool:
        exchange, key = self._targets[queue]
        try:
            head = read_head(message.head)
        except ValueError:
            return False
        headers = head.get("headers") or {}
        origin = head.get("exchange", ""), head.get("routing_key", queue)
        before = headers.get("x-death")
        deaths = [death for death in before if isinstance(death, dict)] if isinstance(before, list) else []
        deaths.insert(0, {"reason": reason, "queue": queue, "count": count, "exchange": origin[0],
                          "routing-keys": [origin[1]], "time": int(time.time())})
        left_out = (COUNT_HEADER, REDELIVERED_HEADER, "eta")
        copy = {
            "body": message.body,
            "content-type": head.get("content_type"),
            "content-encoding": head.get("content_encoding"),
            "headers": {**{name: value for name, value in headers.items() if name not in left_out}, "x-death": deaths},
            "properties": {name: value for name, value in (head.get("properties") or {}).items()
                           if name != "expiration"},
        }
        try:
            return self._shared.publisher.publish(copy, exchange, origin[1] if key is None else str(key))
        except StreambrokerError as error:
            logger.warning("queue %r: the dead-letter exchange %r cannot be published to (%s); the message stays among "
                           "the store's dead letters until it can", queue, exchange, error)
            return False


def reason_for(message: KombuMessage | None) -> str:
    """Why a message is rejected without requeue. Celery does not say: the function that rejects tells most of it."""
    if message is not None and message.undecodable is not None:
        return message.undecodable
    task = message.headers.get("task") if message is not None else None
    frame = sys._getframe(1)
    for _ in range(12):
        meaning = _CELERY_REASONS.get(frame.f_code.co_name)
        if meaning is not None and frame.f_globals.get("__name__", "").startswith("celery."):
            return f"{meaning} {task!r}" if task and meaning == "unknown task" else meaning
        if frame.f_back is None:
            break
        frame = frame.f_back
    return f"rejected without requeue: task {task!r} failed or rejected it" if task else "rejected without requeue"


def is_refusal(error: Exception) -> bool:
    """Whether Celery's worker failed at a message that it was given: a header of a type that it does not look for, say.
    What a store or a link failed at is not the message's."""
    if isinstance(error, (StreambrokerError, OSError, MemoryError)):
        return False
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_code.co_name == "on_task_received" and
               str(frame.f_globals.get("__name__")).startswith("celery.worker.") for frame in frames)


def undecodable_head(delivery: Delivery, error: ValueError) -> str:
    return f"undecodable head: {error} ({len(delivery.message.head)} bytes)"
