"""Taking over from processes that are dead.

When nobody answers on the subject of a process for `PROOF` seconds (the server has seen its connection go), or when its
record is older than its lease, one survivor replaces the record, by compare and set, and tells the server to hand the
messages out again; but only while no lease of them can have run out, since a late hand-back would hit the next holder.
Processes look after their successor in the order of names, so the cost does not grow with the square of their number.
"""

from __future__ import annotations

import json
import logging
import math
import re
import time
from typing import TYPE_CHECKING

from ...errors import StoreConnectionError, StoreError
from .api import WRONG_SEQUENCE, ApiError
from .census import Census, read
from .claims import GRACE
from .frames import Frame
from .names import untoken
from .orphans import Orphans, hand_back, may_hand_back
from .record import EXPECTED, Record
from .streams import MESSAGE_TTL, NANO

if TYPE_CHECKING:
    from .engine import JetStreamEngine

logger = logging.getLogger(__name__)

#: how long nobody must answer for a process before it counts as dead, and how often one is asked (seconds)
PROOF, LOOK = 2.0, 1.0
#: how often the list of processes is read though nobody told of a change (seconds)
REFRESH = 10.0
#: the longest lease
LONGEST = 86400.0
#: of a stream or consumer
_NAME = re.compile(r"[A-Za-z0-9_=-]+")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value) and value >= 0


class Succession:
    """Of one engine, in the link's thread."""

    def __init__(self, engine: JetStreamEngine, record: Record) -> None:
        self._engine = engine
        self._record = record
        self._orphans = Orphans(engine)
        self._peers: list[str] = []
        self._refresh_at = 0.0
        self._look_at = 0.0
        #: since when nobody answers for a process
        self._silent: dict[str, float] = {}
        #: processes whose record was too old at the last look
        self._old: set[str] = set()

    @property
    def known(self) -> list[str]:
        """Names of processes, as they were found last."""
        return self._peers

    def changed(self) -> None:
        """Processes came or went."""
        self._refresh_at = 0.0

    def restart(self) -> None:
        """What was seen before a break proves nothing."""
        self._refresh_at = 0.0
        # others may still be on their way back
        self._look_at = time.monotonic() + GRACE if self._engine.link.epoch > 1 else 0.0
        self._silent.clear()
        self._old.clear()

    async def look(self) -> None:
        try:
            now = time.monotonic()
            if now >= self._refresh_at:
                self._refresh_at = now + REFRESH
                self._peers = await self.peers()
            if now >= self._look_at and len(self._peers) > 1:
                self._look_at = now + min(LOOK, self._engine.lease / 2)
                await self._look_at_next()
        except (StoreConnectionError, StoreError) as error:
            logger.debug("cannot look after others: %s", error)

    async def peers(self) -> list[str]:
        """Names of processes with a record, sorted."""
        names = self._engine.names
        try:
            answer = await self._engine.api.acall(f"STREAM.INFO.{names.held}", {"subjects_filter": f"{names.root}.w.>"})
        except ApiError as error:
            if error.missing:
                return []
            raise
        found = {untoken(subject.rsplit(".", 1)[1]): subject for subject in answer["state"].get("subjects") or {}}
        # others can write there too
        return sorted(name for name, subject in found.items() if name is not None and names.record(name) == subject)

    async def _look_at_next(self) -> None:
        """At the successor, and on while those are silent."""
        me = self._engine.holder.name
        ring = [name for name in self._peers if name > me] + [name for name in self._peers if name < me]
        for name in ring:
            try:
                reply = await self._engine.link.ask(Frame(self._engine.names.presence(name)), LOOK)
                nobody = reply.status == 503
                if not nobody:
                    self._silent.pop(name, None)
                    return
            except StoreConnectionError:
                if not self._engine.link.connected:
                    return
                nobody = False
            since = self._silent.setdefault(name, time.monotonic()) if nobody else None
            if not nobody:
                self._silent.pop(name, None)
            proof = since is not None and time.monotonic() - since >= PROOF
            await self._maybe_take_over(name, proof=proof and self._engine.settings.proof_of_death)

    async def _maybe_take_over(self, name: str, *, proof: bool) -> None:
        engine = self._engine
        found = await self._record.read(name)
        if found is None:
            self._refresh_at = 0.0
            return
        record, sequence, when = found
        age, looked = engine.streams.now() - when, time.monotonic()
        census = read(json.dumps(record).encode(), age)
        lease = min(float(record["lease"]), LONGEST) if _is_number(record.get("lease")) else 0.0
        if record.get("gone"):
            # it may be alive and must be able to see that it was replaced, until it knows by its own clock
            if age > lease + LOOK:
                await self._forget(name)
            return
        if not proof and not self._is_old(name, age > lease + LOOK):
            return
        headers = {EXPECTED: str(sequence)}
        if engine.streams.known_level >= MESSAGE_TTL:
            # nobody may be left to forget it
            headers["Nats-TTL"] = f"{math.ceil(lease + 2 * LOOK)}s"
        frame = Frame(engine.names.record(name), json.dumps({"gone": True, "lease": lease}).encode(), "", headers)
        try:
            await engine.streams.store(frame, engine.names.held)
        except ApiError as error:
            if error.code == WRONG_SEQUENCE:
                return
            raise
        count = await self._hand_back(census, looked) if census is not None else 0
        engine.janitor.soon()
        engine.chores.report(f"worker {name} is gone: {count} messages go to others", calm=True)
        if census is not None:
            self._orphans.seek(census)

    def _is_old(self, name: str, old: bool) -> bool:
        """Whether it was too old at the look before, too."""
        before = name in self._old
        self._old.discard(name)
        if old:
            self._old.add(name)
        return old and before

    async def _forget(self, name: str) -> None:
        names = self._engine.names
        await self._engine.api.acall(f"STREAM.PURGE.{names.held}", {"filter": names.record(name)})
        self._silent.pop(name, None)
        self._old.discard(name)
        self._refresh_at = 0.0
        self._engine.tell({"leave": name})

    async def _hand_back(self, census: Census, looked: float) -> int:
        """What it held at the monotonic time `looked`, where no lease can have run out; the rest waits for its own."""
        engine = self._engine
        groups: dict[tuple[str, str], list[int]] = {}
        for row in census.held:
            if _NAME.fullmatch(row.stream) and _NAME.fullmatch(row.durable):
                groups.setdefault((row.stream, row.durable), []).append(row.sequence)
        count = 0
        for (stream, durable), sequences in groups.items():
            try:
                info = await engine.api.acall(f"CONSUMER.INFO.{stream}.{durable}")
            except ApiError as error:
                if error.missing:
                    continue
                raise
            lease = int(info["config"]["ack_wait"]) / NANO
            # this process, too, may have been stopped meanwhile
            if not may_hand_back(lease, census.renewed + time.monotonic() - looked):
                continue
            last = int(info["delivered"]["consumer_seq"])
            count += await hand_back(engine, stream, durable, last, sequences)
        return count
