"""From a declaration in AMQP's words to a queue of the store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from amqp.exceptions import PreconditionFailed

from ..message import QueueSpec


@dataclass(frozen=True, slots=True)
class Declared:
    """A queue as this connection declared it."""

    spec: QueueSpec
    durable: bool
    exclusive: bool
    auto_delete: bool

    @property
    def can_be_live(self) -> bool:
        """Belongs to its connection and its consumers: bound to a fanout or topic exchange it needs no storage."""
        return self.exclusive or (self.auto_delete and not self.durable)


def declare(name: str, durable: bool, exclusive: bool, auto_delete: bool, arguments: Mapping[str, Any] | None,
            auto_delete_expires: float) -> Declared:
    """`durable=False` alone is kept like a durable queue: nothing but a restart of an AMQP server would end it.

    Raises PreconditionFailed (406) for arguments that cannot be used; unknown ones are kept and mean nothing.
    """
    arguments = dict(arguments or {})
    expires = _number(name, arguments, "x-expires", 1000.0)
    comes_and_goes = exclusive or auto_delete or expires is not None
    if comes_and_goes and expires is None:
        expires = auto_delete_expires
    limit = _number(name, arguments, "x-delivery-limit", 1.0)
    length = _number(name, arguments, "x-max-length", 1.0)
    spec = QueueSpec(
        name, durable=not comes_and_goes, expires=expires,
        message_ttl=_number(name, arguments, "x-message-ttl", 1000.0),
        delivery_limit=None if limit is None else int(limit),
        max_length=None if length is None else int(length),
        arguments=arguments)
    return Declared(spec, bool(durable), bool(exclusive), bool(auto_delete))


def _number(queue: str, arguments: Mapping[str, Any], name: str, divisor: float) -> float | None:
    value = arguments.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
        raise PreconditionFailed(f"queue {queue!r}: {name} is {value!r}, it must be a number from 0 up", (50, 10),
                                 "Channel.queue_declare")
    return value / divisor
