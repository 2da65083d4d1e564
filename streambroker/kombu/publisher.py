"""The way out: Kombu messages to queues and live subscribers, with delay, priority and expiry for the store."""

from __future__ import annotations

import json
import logging
import math
import time
from bisect import bisect_right
from collections.abc import Callable
from datetime import timedelta, timezone
from typing import TYPE_CHECKING, Any

from ..errors import StoreConnectionError, StoreError
from ..message import Message
from ..settings import Settings, read_settings
from . import unfinished
from .message import body_of, make_head, read_eta
from .unroutable import Unroutable

if TYPE_CHECKING:
    from .shared import SharedEngine

logger = logging.getLogger(__name__)

#: the zone that a naive eta is taken to be in: nowhere is it earlier, so it is never released late
_EARLIEST_ZONE = timezone(timedelta(hours=14))

#: how many queue names are remembered
_REMEMBERED = 10_000

#: puts one message where it goes: (queue, whether to make a missing queue, message)
Sink = Callable[[str, bool, Message], None]


class Publisher:
    """Publishing of one engine in this process. Thread-safe."""

    def __init__(self, shared: SharedEngine) -> None:
        self._shared = shared
        #: queues that are known to be durable or to be none of those that come and go
        self.lasting: set[str] = set()
        #: queues that are known to come and go
        self.transient: set[str] = set()
        self.unroutable = Unroutable()
        self._steps = _Steps(shared.endpoint.options)

    def publish(self, message: dict[str, Any], exchange: str, routing_key: str, sink: Sink | None = None) -> bool:
        """Store it, or give it to `sink`. False when no queue wanted it and no live subscriber can have got it.

        Raises TypeError or ValueError for what cannot be a message, MessageTooLarge, StoreError, StoreConnectionError.
        """
        wire = self._wire(message, exchange, routing_key)
        put = sink or self.put
        if not exchange:
            put(routing_key, routing_key in self.lasting or self._lasts(routing_key, message), wire)
            return True
        fleeting = message["properties"].get("delivery_mode") == 1
        place = self._shared.endpoint.url, exchange, routing_key
        stored = unfinished.resume(*place, wire)
        try:
            route = self._shared.router.route(exchange, routing_key, fleeting=fleeting)
            for binding in route.queues:
                if binding.queue not in stored:
                    put(binding.queue, not binding.transient, wire)
                    stored.add(binding.queue)
            if route.live:
                self._shared.engine.broadcast(exchange, wire, routing_key)
        except StoreConnectionError as error:
            if fleeting and _is_passing(exchange, routing_key):
                logger.debug("%r to exchange %r is dropped: %s", routing_key, exchange, error)
                return False
            if stored and sink is None:
                unfinished.note(*place, wire, stored)
            raise
        if route.live and exchange.endswith(".pidbox") and self._shared.adapter.revoke_waiting:
            self._revoke_waiting(message)
        if route.queues:
            return True
        spare = self._shared.adapter.deadletter_queue
        if spare:
            self.unroutable.count += 1
            put(spare, True, wire)
            return True
        if not route.live or "task" in message["headers"]:
            self.unroutable.note(exchange, routing_key, live=route.live)
        return route.live

    def put(self, queue: str, create: bool, message: Message) -> None:
        """Store one message now."""
        if self._shared.orphans:
            self._shared.sweep()
        stored = self._shared.engine.publish(queue, (message,), create=create)
        if not stored and not create:
            self.unroutable.gone(queue)

    def _wire(self, message: dict[str, Any], exchange: str, routing_key: str) -> Message:
        headers, properties = message["headers"], message["properties"]
        eta = headers.get("eta")
        delay = _delay(eta) if eta else None
        return Message(
            body_of(message), make_head(message, exchange, routing_key, waits=delay is not None),
            str(headers.get("id") or properties.get("correlation_id") or ""),
            self._steps.of(properties.get("priority")),
            delay or 0.0,
            # an expired task is for its worker to see: it marks the task as revoked, and tells
            _expiry(properties["expiration"]) if "expiration" in properties and "task" not in headers else None)

    def _lasts(self, queue: str, message: dict[str, Any]) -> bool:
        """Whether a queue that this process did not declare is made when it is missing. Reply queues are not: they
        come and go with the clients that wait, and one made for a client that has gone would stay for ever."""
        if queue in self.transient:
            return False
        spec = self._shared.engine.spec(queue)
        properties = message["properties"]
        is_reply = properties.get("correlation_id") and not properties.get("reply_to")
        if spec is None and is_reply and "task" not in message["headers"]:
            return False
        lasts = spec is None or spec.durable
        known = self.lasting if lasts else self.transient
        if len(known) >= _REMEMBERED:
            known.clear()
        known.add(queue)
        return lasts

    def _revoke_waiting(self, message: dict[str, Any]) -> None:
        """Workers remember what was revoked, and forget; a task that waits in the store is best removed there."""
        if message["content-type"] != "application/json":
            return
        try:
            command = json.loads(message["body"])
            if command.get("method") != "revoke":
                return
            ids = command["arguments"]["task_id"]
        except (ValueError, AttributeError, KeyError, TypeError):
            return
        try:
            names = [str(task_id) for task_id in (ids if isinstance(ids, list) else [ids])]
            removed = self._shared.engine.inspector().drop(names)
            if removed:
                logger.info("of the revoked tasks %s, %d waited for their time and are removed", _few(names), removed)
        except StoreError as error:
            logger.warning("revoked tasks that wait for their time could not be removed: %s", error)


def _few(names: list[str]) -> str:
    return ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")


def _is_passing(exchange: str, routing_key: str) -> bool:
    """Whether a message is worth nothing a moment later. Celery publishes the heartbeats of workers and the answers to
    remote commands from its event loop and repeats them for ever: with the store away the worker would stand still and
    could not be stopped."""
    return routing_key.startswith("worker.") or (exchange.startswith("reply.") and exchange.endswith(".pidbox"))


class _Steps:
    """Priority number to step: as Kombu's Redis transport has it, 0 first, or as AMQP, the highest first."""

    def __init__(self, options: Any) -> None:
        names = {"priority_steps", "priority_order"}
        settings: Settings = read_settings({name: options[name] for name in names & set(options)})
        self._steps = settings.priority_steps
        self._amqp = settings.priority_order == "amqp"
        self._known: dict[Any, int] = {}
        self._warned = False

    def of(self, priority: Any) -> int:
        try:
            step = self._known.get(priority)
        except TypeError:
            step = priority = None
        return self._find(priority) if step is None else step

    def _find(self, priority: Any) -> int:
        try:
            number = int(priority or 0)
        except (TypeError, ValueError, OverflowError):
            number = 0
        clamped = min(9, max(0, number))
        if clamped != number and not self._warned:
            self._warned = True
            logger.warning("priority %r is outside 0 to 9 and is taken as %s", priority, clamped)
        rank = 9 - clamped if self._amqp else clamped
        step = max(0, bisect_right(self._steps, rank) - 1)
        if clamped == number:
            self._known[priority] = step
        return step


def _delay(eta: Any) -> float | None:
    """Seconds until `eta`, 0 when it is past; None when it cannot be read (the worker then says so)."""
    when = read_eta(eta)
    if when is None:
        return None
    if when.tzinfo is None:
        when = when.replace(tzinfo=_EARLIEST_ZONE)
    try:
        left = when.timestamp() - time.time()
    except (OverflowError, ValueError):
        return None
    return max(0.0, left)


def _expiry(expiration: Any) -> float | None:
    """Seconds, from AMQP's milliseconds; None when it is no number."""
    try:
        seconds = float(expiration) / 1000
    except (TypeError, ValueError):
        return None
    return max(0.0, seconds) if math.isfinite(seconds) else None
