"""What the server tells of messages that it gives up: by us, when a message is buried, or by a limit that somebody else
set on a consumer, which would strand messages in the stream."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

from ...errors import StoreError
from .frames import Reply
from .link import Listener

if TYPE_CHECKING:
    from .engine import JetStreamEngine

logger = logging.getLogger(__name__)

_SUBJECT = "$JS.EVENT.ADVISORY.CONSUMER.{}.*.*"
KINDS = ("MAX_DELIVERIES", "MSG_TERMINATED")


async def watch_advisories(engine: JetStreamEngine) -> list[Listener]:
    """Log them from now on; in the link's thread. A user without that right goes without."""
    def told(reply: Reply) -> None:
        kind, stream, durable = reply.subject.split(".")[-3:]
        if stream != engine.names.main and not stream.startswith(f"{engine.names.main}_"):
            return
        try:
            advisory = json.loads(reply.data)
            place = f"message {advisory['stream_seq']} of {stream}, delivery {advisory.get('deliveries', '?')}"
        except (ValueError, KeyError, TypeError):
            place = f"a message of {stream}"
        if kind == "MAX_DELIVERIES":
            engine.chores.report(f"the server gives {place} to nobody any more: consumer {durable} has a limit of its "
                                 "own (max_deliver); remove it, ours goes to the dead letters")
        else:
            logger.info("%s was terminated", place)

    listeners = []
    for kind in KINDS:
        try:
            listeners.append(await engine.link.alisten(_SUBJECT.format(kind), told))
        except StoreError as error:
            logger.debug("advisories %s are not to be had: %s", kind, error)
    return listeners
