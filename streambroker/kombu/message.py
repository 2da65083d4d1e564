"""Messages on the way in and out.

On the wire a Kombu message is its body, as Kombu gave it, and a head: one compact JSON object with `type` (the task's
name), `content_type`, `content_encoding`, `headers`, `properties`, for a named exchange `exchange` and `routing_key`,
and `waits` when it has an eta, for which the store waits. Nothing is encoded twice.
"""

from __future__ import annotations

import json
import sys
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from kombu.compression import decompress
from kombu.message import Message as KombuMessage
from kombu.utils.json import JSONEncoder, object_hook

from .tasks import check_payload, check_task, is_task

if TYPE_CHECKING:
    from ..message import Delivery
    from .channel import Channel

#: headers that tell a receiver about a repeated delivery; never taken from the sender
COUNT_HEADER, REDELIVERED_HEADER = "x-delivery-count", "redelivered"

_write = json.JSONEncoder(
    default=JSONEncoder().default, separators=(",", ":"), ensure_ascii=False, check_circular=False).encode
_read = json.JSONDecoder().decode
_read_typed = json.JSONDecoder(object_hook=object_hook).decode


def write_head(head: dict[str, Any]) -> bytes:
    """Raises TypeError for what neither JSON nor Kombu can express."""
    return _write(head).encode("utf-8", "surrogatepass")


def read_head(head: bytes) -> dict[str, Any]:
    """Raises ValueError when it is no JSON object, or its headers or properties are none."""
    text = head.decode("utf-8", "surrogatepass")
    try:
        found = (_read_typed if '"__type__"' in text else _read)(text)
    except ValueError:
        raise
    except Exception as error:
        # depth, and what the decoders of Kombu's own types make of a value that is none of theirs
        raise ValueError(f"{type(error).__name__}: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"a {type(found).__name__} is no message head")
    for part in ("headers", "properties"):
        if not isinstance(found.get(part) or {}, dict):
            raise ValueError(f"{part} are a {type(found[part]).__name__}")
    return found


def make_head(message: dict[str, Any], exchange: str, routing_key: str, *, waits: bool = False) -> bytes:
    headers, properties = message["headers"], message["properties"]
    task = headers.get("task")
    head: dict[str, Any] = {"type": task} if task else {}
    head["content_type"] = message["content-type"]
    head["content_encoding"] = message["content-encoding"]
    head["headers"] = headers
    head["properties"] = {name: value for name, value in properties.items() if name not in _OURS}
    if exchange:
        head["exchange"] = exchange
        head["routing_key"] = routing_key
    if waits:
        head["waits"] = True
    return write_head(head)


def read_eta(eta: Any) -> datetime | None:
    """None when it is no time."""
    if isinstance(eta, str):
        try:
            return datetime.fromisoformat(eta[:-1] + "+00:00" if eta.endswith(("Z", "z")) else eta)
        except ValueError:
            return None
    return eta if isinstance(eta, datetime) else None


def _over(eta: Any) -> Any:
    """An eta that the store has waited for: now, where this machine's clock is not as far yet. Celery would hold the
    task for the difference. One without a zone is released before its time and is for the worker to judge."""
    when, now = read_eta(eta), datetime.now(timezone.utc)
    return now.isoformat() if when is not None and when.tzinfo is not None and when > now else eta


_OURS = frozenset({"delivery_info", "delivery_tag", "body_encoding"})


def body_of(message: dict[str, Any]) -> bytes:
    """Raises TypeError for a body that was not serialized."""
    body = message["body"]
    if isinstance(body, str):
        return body.encode()
    if isinstance(body, (bytes, bytearray, memoryview)):
        return bytes(body)
    raise TypeError(f"a message body is text or bytes, not {type(body).__name__}: give a serializer")


class Message(KombuMessage):
    """A received message. Made for each delivery, so it only sets attributes; Kombu's own initializer is not called."""

    errors: Any = ()
    #: why the body could not be decoded, once that was tried
    undecodable: str | None = None

    def __init__(self, channel: Channel, delivery: Delivery, delivery_tag: str, consumer_tag: str) -> None:
        """Raises ValueError when the head cannot be read."""
        stored = delivery.message
        head = read_head(stored.head)
        headers: dict[str, Any] = head.get("headers") or {}
        properties: dict[str, Any] = head.get("properties") or {}
        if is_task(headers):
            check_task(headers)
        redelivered = delivery.redelivered or delivery.count > 1
        if redelivered:
            headers[COUNT_HEADER], headers[REDELIVERED_HEADER] = delivery.count, True
        else:
            headers.pop(COUNT_HEADER, None)
            headers.pop(REDELIVERED_HEADER, None)
        if head.get("waits") is True:
            headers["eta"] = _over(headers.get("eta"))
        self.delivery_info = properties["delivery_info"] = {
            "exchange": head.get("exchange", ""),
            "routing_key": head.get("routing_key", delivery.queue),
            "priority": properties.get("priority", 0),
            "redelivered": redelivered,
            "delivery_count": delivery.count,
            "consumer_tag": consumer_tag,
        }
        self.delivery_tag = properties["delivery_tag"] = delivery_tag
        self.channel = channel
        self.content_type = head.get("content_type")
        self.content_encoding = head.get("content_encoding")
        self.headers = headers
        self.properties = properties
        self.body = stored.body
        self.accept = None
        self._decoded_cache = None
        self._state = "RECEIVED"
        if headers.get("compression"):
            self._decompress(headers["compression"])

    def _decompress(self, compression: str) -> None:
        try:
            self.body = decompress(self.body, compression)
        except Exception as error:  # noqa: BLE001  whatever the codec raises is kept for the consumer, as Kombu does
            self.undecodable = f"undecodable: {error!r}"
            self.errors = [sys.exc_info()]

    def _decode(self) -> Any:
        try:
            payload = super()._decode()
            if is_task(self.headers):
                check_payload(payload)
            return payload
        except Exception as error:
            self.undecodable = f"undecodable: {error}"
            raise

    def ack(self, multiple: bool = False) -> None:
        """As Kombu's; but what could not be decoded becomes a dead letter: Celery acknowledges that, which would
        destroy it."""
        if self.undecodable is not None and not self.acknowledged:
            self.channel.bury(self.delivery_tag, self.undecodable)
            self._state = "ACK"
        else:
            super().ack(multiple=multiple)
