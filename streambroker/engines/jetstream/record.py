"""What a process tells of itself in a stream: what it holds and how fresh its leases are. Writing is its sign of life.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import math
import os
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...errors import StoreConnectionError, StoreError
from ...message import Delivery
from .api import WRONG_SEQUENCE, ApiError
from .frames import Frame
from .streams import MESSAGE_TTL, posix

if TYPE_CHECKING:
    from .engine import JetStreamEngine

logger = logging.getLogger(__name__)

#: a change is recorded after so long, or later when much is held (seconds, entries a second)
DELAY, RATE = 0.2, 5000
EXPECTED = "Nats-Expected-Last-Subject-Sequence"
#: room for headers and subject in the server's limit of a message (bytes)
HEADERS = 2048
#: how much longer than a lease a record is kept (seconds)
SPARE = 5.0


class Record:
    """Of one engine, in the link's thread. `replaced` is called when another process has declared this one dead."""

    def __init__(self, engine: JetStreamEngine, replaced: Callable[[], None]) -> None:
        self._engine = engine
        self._replaced = replaced
        self._sequence = 0
        #: monotonic time of the last write
        self.written = float("-inf")
        self._recorded: list[Delivery] = []
        self._planned = False
        self._writing = asyncio.Lock()

    def state(self, *, settling: bool) -> tuple[bytes, list[Delivery]]:
        """The record, which may name only a part of very many messages, and those that it names."""
        holder = self._engine.holder
        oldest = min((each.place.renewed for each in list(holder.held.values())), default=time.monotonic())
        told = {"holder": holder.name, "host": socket.gethostname(), "pid": os.getpid(),
                "queues": self._engine.consumption.queues(), "lease": self._engine.lease, "started": holder.started,
                "age": round(time.monotonic() - oldest, 3)}
        room = self._engine.link.max_payload - len(json.dumps(told)) - HEADERS
        told["held"], listed = holder.listing(settling=settling, room=room)
        return json.dumps(told, separators=(",", ":")).encode(), listed

    def changed(self) -> None:
        """Something new is held."""
        if not self._planned:
            self._planned = True
            pause = max(DELAY, len(self._engine.holder.held) / RATE)
            self._engine.link.call_later(pause, self._write_later)

    def _write_later(self) -> None:
        self._planned = False
        old = time.monotonic() - DELAY * 0.9
        new = [each for each in list(self._engine.holder.held.values()) if not each.place.recorded]
        if any(each.place.got < old for each in new):
            self._engine.link.spawn(self._write_quietly())
        elif new:
            self.changed()

    async def _write_quietly(self) -> None:
        try:
            await self.write()
        except (StoreConnectionError, StoreError) as error:
            logger.debug("the record waits: %s", error)

    async def write(self) -> None:
        """Raises StoreConnectionError, StoreError."""
        async with self._writing:
            engine = self._engine
            await engine.streams.aensure(engine.names.held)
            joined = not self._sequence
            data, held = self.state(settling=False)
            subject = engine.names.record(engine.holder.name)
            headers = self._life()
            try:
                self._sequence = await engine.streams.store(
                    Frame(subject, data, "", {**headers, EXPECTED: str(self._sequence)}), engine.names.held)
            except ApiError as error:
                if error.code != WRONG_SEQUENCE:
                    raise
                self._sequence = await self._rewrite(Frame(subject, data, "", headers))
                if not self._sequence:
                    return
            self.written = time.monotonic()
            for delivery in self._recorded:
                delivery.place.recorded = False
            for delivery in held:
                delivery.place.recorded = True
            self._recorded = held
            if joined:
                engine.tell({"join": engine.holder.name})

    def _life(self) -> dict[str, str]:
        """Headers: nobody may be left to remove it, and when no lease can run any more it is worth nothing."""
        if self._engine.streams.known_level < MESSAGE_TTL:
            return {}
        return {"Nats-TTL": f"{math.ceil(self._engine.lease + SPARE)}s"}

    async def _rewrite(self, frame: Frame) -> int:
        """The record is not as it was left: lost with the server, or replaced because this process was thought dead."""
        engine = self._engine
        found = await self.read(engine.holder.name)
        if found is not None and found[0].get("gone"):
            engine.chores.report("this process was taken for dead, its messages went to others; it goes on under "
                                 "another name")
            engine.holder.rename()
            self._recorded = []
            self.written = float("-inf")
            self._replaced()
            return 0
        return await engine.streams.store(frame, engine.names.held)

    async def remove(self) -> None:
        """Others need not look at it any more."""
        if not self._sequence:
            return
        await self._engine.api.acall(f"STREAM.PURGE.{self._engine.names.held}",
                                     {"filter": self._engine.names.record(self._engine.holder.name)})
        self._sequence = 0
        for delivery in self._recorded:
            delivery.place.recorded = False
        self._recorded = []
        self._engine.tell({"leave": self._engine.holder.name})

    async def read(self, holder: str) -> tuple[dict[str, Any], int, float] | None:
        """(record, sequence, POSIX time)."""
        try:
            answer = await self._engine.api.acall(f"STREAM.MSG.GET.{self._engine.names.held}",
                                                  {"last_by_subj": self._engine.names.record(holder)})
        except ApiError as error:
            if error.missing:
                return None
            raise
        message = answer["message"]
        try:
            record = json.loads(base64.b64decode(message.get("data", "")))
        except ValueError:
            record = {}
        return record if isinstance(record, dict) else {}, int(message["seq"]), posix(message["time"])
