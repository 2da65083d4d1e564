"""Dead letters: what is written of a message that nobody gets any more, and how it is read and put back.

The body is the message's envelope, or what lay in the queue when that was none of ours. Everything else is JSON in one
header.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ...message import DeadLetter, Delivery, Message
from .envelope import Envelope, decode
from .frames import Frame
from .names import readable
from .stored import Stored

if TYPE_CHECKING:
    from .engine import JetStreamEngine

MESSAGE_ID, GRAVE = "Nats-Msg-Id", "Grave"
#: longest reason, what is left of it at least, in characters of its JSON, and room for everything else in the headers:
#: with the body they must fit into the server's limit
REASON, LEAST, REST = 1000, 100, 700


def grave_frame(engine: JetStreamEngine, delivery: Delivery, reason: str, holder: str) -> Frame:
    """The publish of a dead letter; a repetition is recognized by the server. What is left in `delivery.place.data`
    could not be read and is kept as it is."""
    place = delivery.place
    told = {"step": place.step, "count": delivery.count, "first": int((place.first or place.entered) * 1000),
            "holder": holder}
    # what others published may be as large as a message can be
    most = engine.link.max_payload - REST - LEAST
    data: bytes = place.data[:most]
    if data:
        told["foreign"] = True
    else:
        data = Envelope(delivery.message._replace(priority=place.step)).encode()
    room = most - len(data)
    if not readable(delivery.queue) and len(json.dumps(delivery.queue)) <= room:
        told["queue"] = delivery.queue
        room -= len(json.dumps(delivery.queue))
    told["reason"] = _cut(reason, max(LEAST, min(REASON, room)))
    unique = f"dead-{place.stream}-{place.sequence}-{int(place.entered * 1000)}"
    return Frame(engine.names.grave(delivery.queue), data, "",
                 {MESSAGE_ID: unique, GRAVE: json.dumps(told, separators=(",", ":"))})


def _cut(reason: str, most: int) -> str:
    while len(json.dumps(reason)) > most:
        reason = reason[:len(reason) * 3 // 4] + "…"
    return reason


def _told(stored: Stored) -> dict[str, Any]:
    try:
        found = json.loads(stored.headers.get(GRAVE, ""))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def queue_in(stored: Stored) -> str | None:
    """The queue of a dead letter whose subject does not tell it."""
    queue = _told(stored).get("queue")
    return queue if isinstance(queue, str) else None


def read_grave(queue: str, stored: Stored) -> DeadLetter:
    told = _told(stored)

    def number(name: str) -> int:
        value = told.get(name)
        return value if isinstance(value, int) and 0 <= value < 1 << 53 else 0

    fields: dict[str, bytes] = {}
    try:
        if told.get("foreign"):
            raise ValueError
        message = decode(stored.data).message
    except ValueError:
        message = Message(stored.data, b"{}", "", number("step"))
        fields = {"data": stored.data}
    return DeadLetter(queue, str(stored.sequence), message, str(told.get("reason", "")), number("count"),
                      number("first") / 1000, stored.time, str(told.get("holder", "")), fields)


def replay_frame(engine: JetStreamEngine, queue: str, stored: Stored) -> tuple[int, Frame]:
    """(step, publish) that puts a dead letter back as a new message; a repetition is recognized by the server."""
    letter, names = read_grave(queue, stored), engine.names
    step = min(max(letter.message.priority, 0), engine.steps[-1])
    data = stored.data if letter.fields else Envelope(letter.message._replace(expires=None, priority=step),
                                                     replayed=True).encode()
    target = names.brief(queue, step) if engine.queues.is_transient(queue) else names.ready(queue, step)
    return step, Frame(target, data, "", {MESSAGE_ID: f"replay-{stored.sequence}-{int(stored.time * 1000)}"})
