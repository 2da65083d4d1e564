"""What `--json` prints: one flat object for each thing, times in seconds, POSIX where they are moments."""

from __future__ import annotations

import base64
import dataclasses
from typing import Any

from ..message import DeadLetter, Delayed, InFlight, Message, QueueStats, Worker


def stats_record(stats: QueueStats) -> dict[str, Any]:
    return dataclasses.asdict(stats)


def in_flight_record(delivery: InFlight) -> dict[str, Any]:
    return {"id": delivery.id, "holder": delivery.holder, "age": delivery.age, "delivery_count": delivery.count}


def worker_record(worker: Worker) -> dict[str, Any]:
    return dataclasses.asdict(worker)


def dead_record(dead: DeadLetter) -> dict[str, Any]:
    return {"id": dead.id, "queue": dead.queue, "message_id": job(dead.message), "type": task(dead.message),
            "delivery_count": dead.count, "reason": dead.reason, "first": dead.first, "last": dead.last,
            "holder": dead.holder, "size": len(dead.message.body)}


def dead_details(dead: DeadLetter) -> dict[str, Any]:
    """All that is kept of a dead letter, the original included."""
    return {**dead_record(dead), "priority": dead.message.priority, "headers": dead.message.headers,
            **_content("body", dead.message.body),
            "fields": {name: _text(value) for name, value in dead.fields.items()}}


def delayed_record(waiting: Delayed) -> dict[str, Any]:
    return {"id": waiting.id, "queue": waiting.queue, "message_id": job(waiting.message), "type": task(waiting.message),
            "due": waiting.due, "size": len(waiting.message.body)}


def task(message: Message) -> str:
    """The task's name, as the adapter wrote it for people."""
    name = message.headers.get("type")
    return name if isinstance(name, str) else ""


def job(message: Message) -> str:
    """The framework's id of the job: the message's own, or what its head says. Engines keep it in the head alone."""
    if message.id:
        return message.id
    head = message.headers
    parts = [(head, "id"), (head.get("headers"), "id"), (head.get("properties"), "correlation_id")]
    found = (part.get(name) for part, name in parts if isinstance(part, dict))
    return next((name for name in found if isinstance(name, str) and name), "")


def _content(name: str, body: bytes) -> dict[str, str]:
    try:
        return {name: body.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(body).decode()}


def _text(value: bytes) -> str:
    return value.decode(errors="backslashreplace")
