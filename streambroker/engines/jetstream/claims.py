"""Whose a message is that the server hands out again though its holder may live.

The server knows no owner: when its time for an acknowledgement is over, because it was away itself, a link was cut or
a process stopped, the next one who asks gets the message. So whoever gets a message that was out before asks the others
first, each by its own name. A holder that answers keeps it, and the receiver drops it without a word: the holder's
renewals and settlements count for the newest delivery too. Who does not answer loses it. In turn a holder whose lease
may have run out, or whose link broke, asks whether somebody else took it before it renews, gives back or starts it.

The server's count of deliveries decides between two who both believe to have it: the later one has. A receiver that is
still asking has nothing yet.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import StoreConnectionError
from ...message import Delivery
from .books import Book
from .census import read
from .frames import Frame, Reply
from .holder import Key, Phase, Place
from .stored import get_all

if TYPE_CHECKING:
    from .engine import JetStreamEngine

logger = logging.getLogger(__name__)

#: how long after a reconnect the others may still be on their way back (seconds)
GRACE = 3.0
#: how long nobody must answer for a process whose record names the message (seconds)
PROOF = 2.0
#: how old a look may be for the next one to go on from it (seconds)
SEEN = 10.0
#: the longest wait for an answer, the part of a lease that it is at most, and the wait for who was silent lately
ANSWER, OF_LEASE, SHORT = 1.0, 0.25, 0.05
#: how long who was silent counts as that (seconds)
SILENT = 5.0
#: pause before the others are asked again (seconds)
AGAIN = 0.1
#: how long a list of processes is good for (seconds)
FRESH = 1.0
#: messages in one question
PAGE = 500
#: how many acknowledgements are remembered that the server may have missed
MOST = 10_000
#: two times of one entry differ by less (milliseconds)
SAME = 1

#: what a process says about a message: it has it, it asks others about it, it has settled it
HAS, ASKS, DONE = "has", "asks", "done"


class Claims:
    """Of one engine, in the link's thread, but for `acked`."""

    def __init__(self, engine: JetStreamEngine) -> None:
        self._engine = engine
        #: when the link came back, as monotonic and as POSIX time
        self._since = self._before = float("-inf")
        self._names: list[str] = []
        self._names_at = float("-inf")
        #: those that were known before the link broke: their records may have ended while the server was away
        self._expected: set[str] = set()
        #: processes that did not answer, and until when they are hardly waited for
        self._silent: dict[str, float] = {}
        #: processes that nobody answers for: since when, and when that was seen last
        self._absent: dict[str, tuple[float, float]] = {}
        #: processes that were declared dead, and until when they are not asked again
        self._dead: dict[str, float] = {}
        #: acknowledged here, and when the message was stored
        self._done: dict[Key, float] = {}

    def reconnected(self) -> None:
        """The server may have been away, and may have forgotten its last moments."""
        self._since = time.monotonic()
        self._before = self._engine.streams.surely_ahead()
        self._names_at = float("-inf")
        self._expected = {*self._names, *self._engine.watch.succession.known}
        self._silent.clear()
        self._absent.clear()
        for delivery in list(self._engine.holder.held.values()):
            delivery.place.doubt = True

    def durable_made_anew(self) -> None:
        """It hands out what was out before as if for the first time."""
        self._before = max(self._before, self._engine.streams.surely_ahead())

    def doubtful(self, place: Place) -> bool:
        """Whether it may have been out before."""
        return place.raw > 1 or place.entered < self._before

    # ------------------------------------------------------------------ acknowledged
    def acked(self, place: Place) -> None:
        """It was, here. A server that was killed may not know that it had handed it out, and take no notice."""
        if place.got < self._since:
            self.remember(place.key, place.entered)

    def remember(self, key: Key, entered: float) -> None:
        if len(self._done) >= MOST:
            self._done = dict(list(self._done.items())[MOST // 2:])
        self._done[key] = entered

    def is_done(self, place: Place) -> bool:
        return _same(self._done.get(place.key, 0.0), place.entered)

    # ------------------------------------------------------------------ the receiver
    async def look(self, places: Sequence[Place]) -> dict[Key, str]:
        """What another process says about each, HAS or DONE; nothing about those that are free. Raises
        StoreConnectionError, StoreError."""
        found: dict[Key, str] = {}
        asked = {place.key: place for place in places}
        silent: set[str] = set()
        while asked:
            waits: set[Key] = set()
            told = await self._ask_all("take", list(asked.values()), silent)
            for name, rows in told.items():
                if rows is None:
                    waits |= await self._may_have(name, asked.keys())
                    continue
                for key, what, raw in rows:
                    if key in asked and what != ASKS:
                        found[key] = what
                    elif key in asked and (raw, name) < (asked[key].raw, self._engine.holder.name):
                        waits.add(key)
            for key in [key for key in asked if key in found or key not in waits]:
                place = asked.pop(key)
                if key in found:
                    place.phase = Phase.DROPS
            if asked:
                await asyncio.sleep(AGAIN)
        if silent:
            self._tell_taken(silent, [place for place in places if place.key not in found])
        return found

    async def _may_have(self, name: str, keys: Collection[Key]) -> set[Key]:
        """What a process may have that nobody answers for."""
        now = time.monotonic()
        since, seen = self._absent.get(name, (now, now))
        if now - seen > SEEN:
            since = now
        self._absent[name] = since, now
        record = await self._engine.watch.record.read(name)
        if record is not None and record[0].get("gone"):
            self._dead[name] = now + FRESH
            return set()
        if now - self._since < GRACE:
            return set(keys)
        if record is None or now - since >= PROOF:
            return set()
        census = read(json.dumps(record[0]).encode(), 0.0)
        return set() if census is None else {(row.stream, row.sequence) for row in census.held} & set(keys)

    def _tell_taken(self, names: Iterable[str], places: Sequence[Place]) -> None:
        """To those who did not answer: they may live, and read it later."""
        for question in _questions("taken", places):
            self._engine.link.post([Frame(self._engine.names.presence(name), question) for name in names])

    # ------------------------------------------------------------------ the holder
    async def confirm(self, deliveries: Sequence[Delivery]) -> None:
        """Those that another process took or that are stored no more are lost; the rest is without doubt, but its lease
        is to be renewed. Raises StoreConnectionError, StoreError."""
        me = self._engine.holder.name
        mine = {each.place.key: each for each in deliveries}
        since = self._since
        taken: set[Key] = set()
        while mine:
            told = await self._ask_all("mine", [each.place for each in mine.values()], set())
            asks: set[Key] = set()
            for name, rows in told.items():
                for key, what, raw in rows or ():
                    if key not in mine:
                        continue
                    if what == ASKS:
                        asks.add(key)
                    elif what == DONE or (raw, name) > (mine[key].place.raw, me):
                        taken.add(key)
            if not asks - taken:
                break
            await asyncio.sleep(AGAIN)
        left = [each for key, each in mine.items() if key not in taken]
        gone = await self._gone([each for each in left if each.place.overdue])
        for key, delivery in mine.items():
            if key in taken or key in gone:
                delivery.take_away()
                self._engine.let_go(delivery)
            elif since == self._since:
                delivery.place.doubt = False
                self.keep(delivery.place, delivery.place.asked)

    async def _gone(self, deliveries: Sequence[Delivery]) -> set[Key]:
        """Others have taken and settled them."""
        streams: dict[str, list[Place]] = {}
        for delivery in deliveries:
            streams.setdefault(delivery.place.stream, []).append(delivery.place)
        gone: set[Key] = set()
        for stream, places in streams.items():
            stored = await get_all(self._engine, stream, [{"seq": place.sequence} for place in places])
            gone |= {place.key for place, found in zip(places, stored, strict=True)
                     if found is None or not _same(found.time, place.entered)}
        return gone

    # ------------------------------------------------------------------ asking
    async def _ask_all(self, kind: str, places: Sequence[Place], silent: set[str]) -> dict[
            str, list[tuple[Key, str, int]] | None]:
        """What each process says; None for one that nobody answers for. Who does not answer is put into `silent`."""
        engine = self._engine
        if time.monotonic() - self._names_at >= FRESH:
            self._names_at = time.monotonic()
            self._names = await engine.watch.succession.peers()
        expected = self._expected if time.monotonic() - self._since < GRACE else set()
        now = time.monotonic()
        self._dead = {name: until for name, until in self._dead.items() if until > now}
        names = [name for name in {*self._names, *expected} if name != engine.holder.name and name not in self._dead]
        if not names:
            return {}
        questions = _questions(kind, places)
        answers = await asyncio.gather(*(self._ask(name, questions, silent) for name in names))
        return dict(zip(names, answers, strict=True))

    async def _ask(self, name: str, questions: Sequence[bytes], silent: set[str]) -> list[
            tuple[Key, str, int]] | None:
        engine = self._engine
        patience = min(ANSWER, engine.lease * OF_LEASE)
        if self._silent.get(name, 0.0) > time.monotonic():
            patience = SHORT
        found: list[tuple[Key, str, int]] = []
        for question in questions:
            try:
                reply = await engine.link.ask(Frame(engine.names.presence(name), question), patience)
            except StoreConnectionError:
                if not engine.link.connected:
                    raise
                self._silent[name] = time.monotonic() + SILENT
                silent.add(name)
                return found
            if reply.status == 503:
                return None
            found += _read(reply.data)
        self._silent.pop(name, None)
        self._absent.pop(name, None)
        return found

    # ------------------------------------------------------------------ answering
    def answer(self, reply: Reply) -> bytes:
        """To a question of another process."""
        try:
            question: dict[str, Any] = json.loads(reply.data)
            kind = str(question["kind"])
            rows = [(str(stream), int(sequence), int(raw), float(when) / 1000)
                    for stream, found in question["of"] for sequence, raw, when in found]
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            logger.debug("a question that cannot be read: %s", error)
            return b"[]"
        told: list[list[object]] = []
        for stream, sequence, raw, entered in rows:
            key = stream, sequence
            delivery = self._engine.holder.held.get(key)
            if delivery is None or delivery.lost or not _same(delivery.place.entered, entered):
                if _same(self._done.get(key, 0.0), entered):
                    told.append([*key, DONE, 0])
            elif kind == "taken":
                if raw >= delivery.place.raw:
                    delivery.take_away()
                    self._engine.let_go(delivery)
            elif delivery.place.phase is not Phase.DROPS:
                told.append([*key, HAS if delivery.place.phase is Phase.HAS else ASKS, delivery.place.raw])
                if kind == "take" and delivery.place.phase is Phase.HAS:
                    self.again(delivery, raw)
        return json.dumps(told, separators=(",", ":")).encode()

    def again(self, delivery: Delivery, raw: int) -> None:
        """The server has handed it out for the `raw`th time, and it stays here."""
        if delivery.place.unsure:
            delivery.place.asked = max(delivery.place.asked, raw)
        else:
            self.keep(delivery.place, raw)

    def keep(self, place: Place, raw: int) -> None:
        """Deliveries up to `raw` beside this one do not count."""
        more = raw - place.raw
        if more <= 0:
            return
        book = place.book or Book()
        on_trial = bool(book.trial) and book.at == place.raw
        place.raw = raw
        self._engine.link.post([self._engine.books.frame(
            place, returns=book.returns + more, at=raw if on_trial else book.at)])


def _same(one: float, other: float) -> bool:
    return abs(one - other) * 1000 <= SAME


def _questions(kind: str, places: Sequence[Place]) -> list[bytes]:
    questions = []
    for start in range(0, len(places), PAGE):
        streams: dict[str, list[tuple[int, int, float]]] = {}
        for place in places[start:start + PAGE]:
            streams.setdefault(place.stream, []).append((place.sequence, place.raw, round(place.entered * 1000, 3)))
        questions.append(json.dumps({"kind": kind, "of": list(streams.items())}, separators=(",", ":")).encode())
    return questions


def _read(data: bytes) -> list[tuple[Key, str, int]]:
    try:
        return [((str(stream), int(sequence)), str(what), int(raw))
                for stream, sequence, what, raw in json.loads(data)]
    except (ValueError, TypeError) as error:
        logger.debug("an answer that cannot be read: %s", error)
        return []
