"""Signs of life: renewing leases, telling what this process holds, and taking over from processes that are dead.

Each process keeps a record in a stream: what it holds and how fresh its leases are. It also answers questions on a
subject of its own. When nobody answers there for `PROOF` seconds (the server has seen the connection go) or when a
record is older than its lease, one survivor replaces the record, by compare and set, and tells the server to hand the
messages out again; but only while no lease of them can have run out, since a late hand-back would hit the next holder.
Processes watch their successor in the order of names, so the cost does not grow with the square of their number.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import socket
import time
from typing import TYPE_CHECKING, Any

from ...errors import StoreConnectionError, StoreError
from ...message import Delivery
from .api import WRONG_SEQUENCE, ApiError
from .frames import Frame, Reply
from .link import Listener
from .names import untoken
from .settles import BUSY, NAK
from .streams import NANO, posix

if TYPE_CHECKING:
    from .engine import JetStreamEngine

logger = logging.getLogger(__name__)

#: how long nobody must answer for a process before it counts as dead, and how often one is asked (seconds)
PROOF, LOOK = 2.0, 1.0
#: how often the list of processes is read though nobody told of a change (seconds)
REFRESH = 10.0
#: a change is recorded after so long, or later when much is held (seconds, entries a second)
DELAY, RATE = 0.2, 5000
#: how old leases may be when they are taken over, as a part of the lease that must be left
LEFT = 0.1


class Watch:
    """Of one engine, in the link's thread."""

    def __init__(self, engine: JetStreamEngine) -> None:
        self._engine = engine
        self._running = False
        self._listeners: list[Listener] = []
        self._sequence = 0
        self._written = float("-inf")
        self._recorded: list[Delivery] = []
        self._planned = False
        self._writing = asyncio.Lock()
        self._peers: list[str] = []
        self._refresh_at = 0.0
        self._look_at = 0.0
        self._silent: dict[str, float] = {}
        self._looking = False
        self._renewing = False

    @property
    def lease(self) -> float:
        return self._engine.lease

    # ------------------------------------------------------------------ start and end
    def start(self) -> None:
        if not self._running:
            self._running = True
            self._engine.link.spawn(self._run())

    async def _run(self) -> None:
        while self._running and not self._engine.closed:
            try:
                if self._engine.link.connected:
                    await self._turn()
            except (StoreConnectionError, StoreError) as error:
                logger.debug("the watch waits: %s", error)
            await asyncio.sleep(min(0.5, self.lease / 4))

    async def _turn(self) -> None:
        now = time.monotonic()
        if not self._listeners:
            await self._listen()
        for consumer in self._engine.consumers_open():
            consumer.look(now)
        if not self._renewing:
            self._renewing = True
            self._engine.link.spawn(self._renew())
        if self._engine.consuming() or self._engine.holder.held:
            if now - self._written > self.lease / 3:
                await self.write_record()
            if not self._looking:
                self._looking = True
                self._engine.link.spawn(self._look())
        if self._engine.streams.clock_is_old:
            sent = time.monotonic()
            self._engine.streams.measure(
                await self._engine.api.acall(f"STREAM.INFO.{self._engine.names.held}"), sent)

    async def _listen(self) -> None:
        names, link = self._engine.names, self._engine.link
        self._listeners = [
            await link.alisten(names.everyone, self._asked),
            await link.alisten(names.presence(self._engine.holder.name), self._asked),
            await link.alisten(names.news, self._news)]

    async def stop(self) -> None:
        """Forget the record; others need not look at it."""
        self._running = False
        if self._sequence:
            await self._remove_record()

    async def consuming_less(self) -> None:
        """Tell it to others."""
        try:
            if self._engine.consuming() or self._engine.holder.held:
                await self.write_record()
            elif self._sequence:
                await self._remove_record()
        except (StoreConnectionError, StoreError) as error:
            logger.debug("cannot tell what is consumed: %s", error)

    async def _remove_record(self) -> None:
        await self._engine.api.acall(f"STREAM.PURGE.{self._engine.names.held}",
                                     {"filter": self._engine.names.record(self._engine.holder.name)})
        self._sequence = 0
        for delivery in self._recorded:
            delivery.place.recorded = False
        self._recorded = []
        self._engine.tell({"leave": self._engine.holder.name})

    def reconnected(self) -> None:
        """The record may be gone with the server, and with it what others know."""
        self._refresh_at = self._look_at = 0.0
        self._silent.clear()
        if self._running and (self._engine.consuming() or self._engine.holder.held):
            self._written = float("-inf")

    # ------------------------------------------------------------------ answering
    def state(self, *, settling: bool) -> dict[str, Any]:
        holder = self._engine.holder
        oldest = min((each.place.renewed for each in list(holder.held.values())), default=time.monotonic())
        return {"holder": holder.name, "host": socket.gethostname(), "pid": os.getpid(),
                "queues": self._engine.consuming(), "lease": self.lease, "started": holder.started,
                "age": round(time.monotonic() - oldest, 3), "held": holder.listing(settling=settling)}

    def _asked(self, reply: Reply) -> None:
        if reply.reply:
            data = json.dumps(self.state(settling=True), separators=(",", ":")).encode() if reply.data else b"1"
            self._engine.link.post([Frame(reply.reply, data)])

    def _news(self, reply: Reply) -> None:
        try:
            news = json.loads(reply.data)
        except ValueError:
            return
        if "steps" in news:
            self._engine.steps_changed(str(news["steps"]))
        else:
            self._refresh_at = 0.0

    # ------------------------------------------------------------------ the record
    def changed(self) -> None:
        """Something new is held."""
        if not self._planned:
            self._planned = True
            pause = max(DELAY, len(self._engine.holder.held) / RATE)
            self._engine.link.call_later(pause, self._write_later)

    def _write_later(self) -> None:
        self._planned = False
        old = time.monotonic() - DELAY * 0.9
        if any(each.place.got < old and not each.place.recorded for each in list(self._engine.holder.held.values())):
            self._engine.link.spawn(self._write_quietly())
        elif self._engine.holder.held:
            self.changed()

    async def _write_quietly(self) -> None:
        try:
            await self.write_record()
        except (StoreConnectionError, StoreError) as error:
            logger.debug("the record waits: %s", error)

    async def write_record(self) -> None:
        """Raises StoreConnectionError, StoreError."""
        async with self._writing:
            engine = self._engine
            await engine.streams.aensure(engine.names.held)
            joined = not self._sequence
            held = [each for each in list(engine.holder.held.values()) if not each.settled]
            data = json.dumps(self.state(settling=False), separators=(",", ":")).encode()
            subject = engine.names.record(engine.holder.name)
            headers = {"Nats-Expected-Last-Subject-Sequence": str(self._sequence)}
            try:
                self._sequence = await engine.store(Frame(subject, data, "", headers), engine.names.held)
            except ApiError as error:
                if error.code != WRONG_SEQUENCE:
                    raise
                self._sequence = await self._rewrite(Frame(subject, data))
                if not self._sequence:
                    return
            self._written = time.monotonic()
            for delivery in self._recorded:
                delivery.place.recorded = False
            for delivery in held:
                delivery.place.recorded = True
            self._recorded = held
            if joined:
                engine.tell({"join": engine.holder.name})

    async def _rewrite(self, frame: Frame) -> int:
        """The record is not as it was left: lost with the server, or replaced because this process was thought dead."""
        engine = self._engine
        found = await self.read_record(engine.holder.name)
        if found is not None and found[0].get("gone"):
            engine.chores.report("this process was taken for dead, its messages went to others; it goes on under "
                                 "another name")
            engine.holder.rename()
            for listener in self._listeners:
                listener.close()
            self._listeners = []
            self._recorded = []
            self._written = float("-inf")
            return 0
        return await engine.store(frame, engine.names.held)

    async def read_record(self, holder: str) -> tuple[dict[str, Any], int, float] | None:
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

    # ------------------------------------------------------------------ renewing
    async def _renew(self) -> None:
        try:
            now = time.monotonic()
            due: list[Delivery] = []
            for delivery in list(self._engine.holder.held.values()):
                if self._engine.is_lost(delivery):
                    delivery.lost = True
                    self._engine.let_go(delivery)
                elif not delivery.settled and now - delivery.place.renewed > delivery.place.lease / 3:
                    due.append(delivery)
            for start in range(0, len(due), 500):
                part = due[start:start + 500]
                sent = time.monotonic()
                if not self._engine.link.post([Frame(each.place.reply, BUSY) for each in part[:-1]]):
                    return
                # what was sent before the last one is through when that is answered
                await self._engine.link.ask(Frame(part[-1].place.reply, BUSY), min(5.0, self.lease / 2))
                for delivery in part:
                    delivery.place.renewed = sent
        except (StoreConnectionError, StoreError) as error:
            logger.debug("leases were not renewed: %s", error)
        finally:
            self._renewing = False

    # ------------------------------------------------------------------ looking after others
    async def _look(self) -> None:
        try:
            now = time.monotonic()
            if now >= self._refresh_at:
                self._refresh_at = now + REFRESH
                self._peers = await self.peers()
            if now >= self._look_at and len(self._peers) > 1:
                self._look_at = now + min(LOOK, self.lease / 2)
                await self._look_at_next()
        except (StoreConnectionError, StoreError) as error:
            logger.debug("cannot look after others: %s", error)
        finally:
            self._looking = False

    async def peers(self) -> list[str]:
        """Names of processes with a record, sorted."""
        names = self._engine.names
        try:
            answer = await self._engine.api.acall(f"STREAM.INFO.{names.held}", {"subjects_filter": f"{names.root}.w.>"})
        except ApiError as error:
            if error.missing:
                return []
            raise
        found = [untoken(subject.rsplit(".", 1)[1]) for subject in answer["state"].get("subjects") or {}]
        return sorted(name for name in found if name is not None)

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
        found = await self.read_record(name)
        if found is None:
            self._refresh_at = 0.0
            return
        record, sequence, when = found
        age = engine.streams.now() - when
        if not record.get("gone"):
            # another look than this one must have found it silent, too
            if not proof and (age < float(record.get("lease", 30)) + LOOK or name not in self._silent and
                              not self._seen_old(name)):
                return
            frame = Frame(engine.names.record(name), b'{"gone":true}', "",
                          {"Nats-Expected-Last-Subject-Sequence": str(sequence)})
            try:
                await engine.store(frame, engine.names.held)
            except ApiError as error:
                if error.code == WRONG_SEQUENCE:
                    return
                raise
            count = await self._hand_back(record, age)
            engine.chores.report(f"worker {name} is gone, {count} of its messages go to others", calm=True)
        elif age < LOOK * 5:
            return
        await engine.api.acall(f"STREAM.PURGE.{engine.names.held}", {"filter": engine.names.record(name)})
        self._silent.pop(name, None)
        self._refresh_at = 0.0
        engine.tell({"leave": name})

    def _seen_old(self, name: str) -> bool:
        """Whether an earlier look found the record too old."""
        before = self._silent.get(f"old {name}")
        self._silent[f"old {name}"] = time.monotonic()
        return before is not None

    async def _hand_back(self, record: dict[str, Any], age: float) -> int:
        """What the record names, where no lease can have run out; the others come back when theirs does."""
        engine = self._engine
        groups: dict[tuple[str, str], list[int]] = {}
        for row in record.get("held", []):
            groups.setdefault((str(row[4]), str(row[5])), []).append(int(row[6]))
        count = 0
        for (stream, durable), sequences in groups.items():
            try:
                info = await engine.api.acall(f"CONSUMER.INFO.{stream}.{durable}")
            except ApiError as error:
                if error.missing:
                    continue
                raise
            lease = int(info["config"]["ack_wait"]) / NANO
            if age + float(record.get("age", 0)) > lease - max(0.5, lease * LEFT):
                continue
            last = int(info["delivered"]["consumer_seq"])
            # the server looks at the stream's sequence, and at the consumer's only for being one it has handed out
            frames = [Frame(f"$JS.ACK.{stream}.{durable}.1.{sequence}.{last}.0.0", NAK)
                      for sequence in sorted(sequences)]
            for start in range(0, len(frames), 500):
                if not engine.link.post(frames[start:start + 500]):
                    raise StoreConnectionError("the link broke")
                await asyncio.sleep(0)
            count += len(frames)
        return count
