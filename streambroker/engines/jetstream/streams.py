"""The streams, made when they are needed, what the server can do, and the server's clock."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from ...errors import StoreError, StoreUnavailable
from .api import NOBODY, NOT_NOW, STREAM_EXISTS, Api, ApiError
from .frames import Frame
from .link import Link
from .names import Names

if TYPE_CHECKING:
    from ...settings import JetStreamSettings

logger = logging.getLogger(__name__)

NANO = 1_000_000_000
#: how far two clocks drift apart in a second, and the largest error that is reckoned with (seconds)
DRIFT, WRONG = 1e-4, 0.1
#: a stream that was there and is not may be in the middle of its deletion, and one that is made then is damaged by the
#: rest of it: pause before it is made anew (seconds)
DELETING = 0.5
#: how long a publish waits for its confirmation (seconds)
PATIENCE = 3.0
#: API level from which the server has message schedules and per-message TTL (nats-server 2.12, 2.11)
SCHEDULES, MESSAGE_TTL = 2, 1
#: what a stream that an older server made does not have; but for the bounds of dead letters, the rest of it is left as
#: it was made
_LEARNT = ("allow_msg_ttl", "allow_msg_schedules", "allow_direct")
_BOUNDS = ("max_age", "max_msgs_per_subject", "duplicate_window")


def posix(text: str) -> float:
    """POSIX time of an RFC 3339 time with nanoseconds."""
    found = re.fullmatch(r"(.*?)(\.\d+)?(Z|[+-]\d\d:\d\d)", text)
    if not found:
        raise ValueError(f"no time: {text!r}")
    zone = "+00:00" if found[3] == "Z" else found[3]
    return datetime.fromisoformat(found[1] + zone).timestamp() + float(found[2] or 0)


def _update(found: Mapping[str, Any], wanted: Mapping[str, Any], bounds: Sequence[str]) -> dict[str, Any]:
    """The configuration of a stream with what its server has learnt since it was made and with what the options say now
    of `bounds`; empty when nothing differs."""
    changes: dict[str, Any] = {name: True for name in _LEARNT if wanted.get(name) and not found.get(name)}
    changes |= {name: wanted[name] for name in bounds if wanted[name] != found.get(name)}
    return {**found, **changes} if changes else {}


class Streams:
    """Thread-safe; `ensure` in any thread but the link's, `aensure` in the link's."""

    def __init__(self, link: Link, api: Api, names: Names, settings: JetStreamSettings) -> None:
        self._link = link
        self._api = api
        self._names = names
        self._settings = settings
        self._known: set[str] = set()
        self._created: dict[str, str] = {}
        #: called, in any thread, with a stream that is another one than before
        self.on_other: Callable[[str], None] | None = None
        self._level: int | None = None
        #: the server's clock less our monotonic one, how wrong that may have been and when
        self._offset = time.time() - time.monotonic()
        self._doubt = float("inf")
        self._measured = time.monotonic()

    # The server

    def level(self) -> int:
        """JetStream API level: 0 before 2.11."""
        if self._level is None:
            self._level = int(self._api.call("INFO").get("api", {}).get("level", 0))
        return self._level

    @property
    def known_level(self) -> int:
        """The same without asking; 0 as long as nobody asked."""
        return self._level or 0

    async def alevel(self) -> int:
        if self._level is None:
            answer = await self._api.acall("INFO", patience=self._settings.reconnect_timeout)
            self._level = int(answer.get("api", {}).get("level", 0))
        return self._level

    def now(self) -> float:
        """POSIX time by the server's clock, as good as it is known."""
        return time.monotonic() + self._offset

    def surely_past(self) -> float:
        """POSIX time that the server's clock has reached whatever the measurement was worth."""
        return self.now() - min(self._error(), WRONG)

    def surely_ahead(self) -> float:
        """The same for the time that it has not passed."""
        return self.now() + min(self._error(), WRONG)

    def _error(self) -> float:
        return self._doubt + DRIFT * (time.monotonic() - self._measured)

    def measure(self, answer: Mapping[str, Any], sent: float) -> None:
        """Learn the server's clock from the `ts` of an answer to a request that was sent at `sent` (time.monotonic()),
        if that tells more than what is known."""
        stamp, received = answer.get("ts"), time.monotonic()
        doubt = (received - sent) / 2
        if stamp and doubt < self._error():
            self._offset = posix(stamp) - (sent + received) / 2
            self._doubt, self._measured = doubt, received

    @property
    def clock_is_old(self) -> bool:
        return self._doubt == float("inf") or time.monotonic() - self._measured > 60

    # The streams

    def ensure(self, stream: str, queue: str = "") -> None:
        """Make it unless it is known to be there; `queue` names whose stream it is."""
        if stream not in self._known:
            sent = time.monotonic()
            self._made(stream, self._create(stream, queue), sent)

    def _create(self, stream: str, queue: str) -> dict[str, Any]:
        wanted = self._config(stream, queue, self.level())
        info = None
        if stream in self._created:
            try:
                info = self._api.call(f"STREAM.INFO.{stream}")
            except ApiError as error:
                if not error.missing:
                    raise
                time.sleep(DELETING)
        if info is None:
            try:
                return self._api.call(f"STREAM.CREATE.{stream}", wanted)
            except ApiError as error:
                if error.code != STREAM_EXISTS:
                    raise
            info = self._api.call(f"STREAM.INFO.{stream}")
        update = self._changes(stream, info["config"], wanted)
        try:
            return self._api.call(f"STREAM.UPDATE.{stream}", update) if update else info
        except StoreError as error:
            return self._left_alone(stream, info, error)

    async def aensure(self, stream: str, queue: str = "") -> None:
        if stream in self._known:
            return
        sent, patience = time.monotonic(), self._settings.reconnect_timeout
        self._made(stream, await self._acreate(stream, queue, patience), sent)

    async def _acreate(self, stream: str, queue: str, patience: float) -> dict[str, Any]:
        wanted = self._config(stream, queue, await self.alevel())
        info = None
        if stream in self._created:
            try:
                info = await self._api.acall(f"STREAM.INFO.{stream}", patience=patience)
            except ApiError as error:
                if not error.missing:
                    raise
                await asyncio.sleep(DELETING)
        if info is None:
            try:
                return await self._api.acall(f"STREAM.CREATE.{stream}", wanted, patience=patience)
            except ApiError as error:
                if error.code != STREAM_EXISTS:
                    raise
            info = await self._api.acall(f"STREAM.INFO.{stream}", patience=patience)
        update = self._changes(stream, info["config"], wanted)
        try:
            return await self._api.acall(f"STREAM.UPDATE.{stream}", update, patience=patience) if update else info
        except StoreError as error:
            return self._left_alone(stream, info, error)

    def _changes(self, stream: str, found: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
        # a stream that gets more copies may stand still for seconds: that is the operator's to begin
        if wanted["num_replicas"] > found.get("num_replicas", 1) and stream not in self._created:
            logger.warning("stream %s has %d copies, the option replicas says %d: `nats stream edit %s --replicas %d` "
                           "makes more of what was there before", stream, found.get("num_replicas", 1),
                           wanted["num_replicas"], stream, wanted["num_replicas"])
        return _update(found, wanted, _BOUNDS if stream == self._names.dead else ())

    @staticmethod
    def _left_alone(stream: str, info: dict[str, Any], error: StoreError) -> dict[str, Any]:
        """It works as it is."""
        logger.warning("stream %s stays as it was made, the server refuses to change it: %s", stream, error)
        return info

    def _made(self, stream: str, answer: dict[str, Any], sent: float) -> None:
        self.measure(answer, sent)
        self._known.add(stream)
        created = str(answer.get("created", ""))
        before = self._created.get(stream, created)
        self._created[stream] = created
        if created != before and self.on_other is not None:
            self.on_other(stream)

    def forget(self, stream: str) -> None:
        """It may be gone."""
        self._known.discard(stream)

    def deleted(self, stream: str) -> None:
        """It is gone, by our own hand."""
        self.forget(stream)
        self._created.pop(stream, None)

    def forget_all(self) -> None:
        self._known.clear()
        self._level = None

    async def store(self, frame: Frame, stream: str, queue: str = "") -> int:
        """Publish in the link's thread; the sequence. Raises ApiError, StoreError, StoreConnectionError."""
        for again in (True, False):
            reply = await self._link.ask(frame, min(PATIENCE, self._settings.socket_timeout))
            if reply.status != 503 or not again:
                break
            self.forget(stream)
            await self.aensure(stream, queue)
        if reply.status == 503:
            raise StoreUnavailable(NOBODY)
        try:
            answer: dict[str, Any] = json.loads(reply.data)
        except ValueError as error:
            raise StoreError(f"unexpected answer on {frame.subject}: {reply.data[:200]!r}") from error
        problem = answer.get("error")
        if problem:
            code, text = int(problem.get("err_code", 0)), str(problem.get("description", ""))
            if code in NOT_NOW:
                raise StoreUnavailable(f"publish on {frame.subject}: {text} (error {code})")
            raise ApiError(f"publish on {frame.subject}", code, text)
        return int(answer["seq"])

    async def store_all(self, frames: Sequence[Frame], stream: str) -> None:
        """Publish many that may be repeated; returns when all are stored. Raises as `store`."""
        replies = await self._link.asks(frames, min(PATIENCE, self._settings.socket_timeout))
        for frame, reply in zip(frames, replies, strict=True):
            if reply is None or reply.status or b'"error"' in reply.data:
                await self.store(frame, stream)

    def _config(self, stream: str, queue: str, level: int) -> dict[str, Any]:
        names, settings = self._names, self._settings
        config: dict[str, Any] = {
            "name": stream, "retention": "limits", "storage": settings.storage, "discard": "old", "max_consumers": -1,
            "max_msgs": -1, "max_bytes": -1, "max_age": 0, "max_msgs_per_subject": -1,
            "num_replicas": settings.replicas, "duplicate_window": int(settings.duplicate_window * NANO),
            "allow_direct": True, "allow_rollup_hdrs": True}
        if level >= MESSAGE_TTL:
            config["allow_msg_ttl"] = True
        root = names.root
        if stream == names.dead:
            age = int(settings.dead_letter_max_age * NANO)
            config |= {"subjects": [f"{root}.x.*"], "max_age": age,
                       "max_msgs_per_subject": settings.dead_letter_max_count,
                       "duplicate_window": min(config["duplicate_window"], age)}
        elif stream == names.state:
            config |= {"subjects": [f"{root}.s.*.*", f"{root}.b.*.*"], "max_msgs_per_subject": 1}
        elif stream == names.held:
            config |= {"subjects": [f"{root}.w.*"], "max_msgs_per_subject": 1, "max_age": 7 * 86400 * NANO}
        elif stream == names.transient:
            config |= {"subjects": [f"{root}.t.*.*"], "retention": "interest"}
        elif stream == names.late:
            config |= {"subjects": [f"{root}.l.*.*.>"], "retention": "workqueue"}
        else:
            config |= {"subjects": names.work_subjects(queue), "retention": "workqueue"}
            if level >= SCHEDULES:
                config["allow_msg_schedules"] = True
        return config
