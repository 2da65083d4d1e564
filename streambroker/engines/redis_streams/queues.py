"""Which queues there are and how they behave: a shared table of their specs, and what this process knows of it."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import time
from typing import TYPE_CHECKING, Any

from ...message import QueueSpec
from .keys import GROUP
from .resp import pack
from .scripts import script
from .table import RedisTable

if TYPE_CHECKING:
    from .commands import Commands
    from .engine import RedisStreamsEngine

logger = logging.getLogger(__name__)


def dump_spec(spec: QueueSpec) -> str:
    values = {field.name: getattr(spec, field.name) for field in dataclasses.fields(QueueSpec)
              if getattr(spec, field.name) != field.default and field.name != "name"}
    values["arguments"] = dict(spec.arguments)
    return json.dumps({name: value for name, value in values.items() if value != {}}, sort_keys=True, default=str)


_KINDS: dict[str, Any] = {"durable": bool, "expires": (int, float), "message_ttl": (int, float), "delivery_limit": int,
                          "max_length": int, "arguments": dict}


def load_spec(name: str, text: str) -> QueueSpec:
    """As it was declared; what is none of ours in a row counts as not there."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        logger.warning("the row of queue %r is none of ours and is ignored", name)
        return QueueSpec(name)
    return QueueSpec(name, **{key: value for key, value in row.items() if isinstance(value, _KINDS.get(key, ()))
                              and not (isinstance(value, float) and not math.isfinite(value))})


class Queues:
    """Thread-safe: every attribute is replaced or changed in one atomic step."""

    def __init__(self, engine: RedisStreamsEngine) -> None:
        self._engine = engine
        self._table = RedisTable(engine.commands, engine.keys, "queues")
        #: deleted queues whose dead letters are still there
        self.graves = RedisTable(engine.commands, engine.keys, "graves")
        self._transient: dict[str, float] = {}
        self._learned: set[str] = set()
        #: own delivery limits and message TTLs (ms) of queues that have one
        self.limits: dict[str, int] = {}
        self.ttls: dict[str, int] = {}
        #: every queue that this process consumed
        self.touched: set[str] = set()

    def declare(self, spec: QueueSpec) -> None:
        self._note(spec)
        engine = self._engine
        if spec.durable or not spec.expires:
            self._table.put(spec.name, dump_spec(spec))
            return
        for reply in engine.commands.many([data for _, data in self.refresh(spec.name)]):
            engine.commands.check(reply)
        self._table.put(spec.name, dump_spec(spec), queue=spec.name)

    def _note(self, spec: QueueSpec) -> None:
        if spec.delivery_limit is not None:
            self.limits[spec.name] = spec.delivery_limit
        if spec.message_ttl is not None:
            self.ttls[spec.name] = max(1, int(spec.message_ttl * 1000))
        if not spec.durable and spec.expires:
            self._transient[spec.name] = spec.expires

    def spec(self, queue: str) -> QueueSpec | None:
        row = self._table.rows().get(queue)
        if row is None:
            return None
        spec = load_spec(queue, row)
        if not spec.durable and spec.expires and not self._engine.commands.call(
                "EXISTS", self._engine.keys.stream(queue, 0)):
            return None
        return spec

    def names(self) -> list[str]:
        engine, graves = self._engine, self.graves.rows()
        empty = [queue for queue in graves if not engine.commands.call("EXISTS", engine.keys.dead(queue))]
        self.graves.delete(empty)
        rows = self._table.rows()
        for queue, row in rows.items():
            # perhaps no process is there whose keeper would notice
            if '"durable": false' in row and engine.commands.call("PTTL", engine.keys.stream(queue, 0)) == -2:
                self.dropped(queue, engine.commands)
                empty.append(queue)
        return sorted({*rows, *graves} - {*empty})

    def learn(self, queue: str) -> None:
        """Know the spec of a queue before consuming it."""
        self.touched.add(queue)
        spec = self.spec(queue)
        if spec is not None:
            self._note(spec)
        elif queue not in self._transient:
            self._table.put(queue, dump_spec(QueueSpec(queue)))

    def learn_options(self, queue: str, commands: Commands | None = None) -> None:
        """Know roughly now what a queue that this process does not use has of its own."""
        row = self._table.rows(60.0, commands).get(queue)
        if row is not None and queue not in self._learned:
            self._learned.add(queue)
            self._note(load_spec(queue, row))

    def published(self, queue: str) -> None:
        """A publish had to make the stream: the queue is new here, or the store was emptied."""
        if self._table.rows(max_age=1.0).get(queue) is None or self._table.rows().get(queue) is None:
            self._table.put(queue, dump_spec(QueueSpec(queue)))

    def refresh(self, queue: str) -> list[tuple[float, bytes]]:
        """(seconds, command)s that keep a transient queue in being; none for a durable one."""
        expires = self._transient.get(queue)
        if expires is None:
            return []
        engine, ms = self._engine, max(1, int(expires * 1000))
        due = f"{(time.time() + expires) * 1000:.0f}"
        return [
            (expires / 3, script("declare").call([engine.keys.stream(queue, 0), engine.keys.root(queue)], GROUP, ms,
                                                 *engine.steps)),
            (expires / 3, pack("ZADD", engine.keys.timers, due, f"q\n{queue}")),
        ]

    def reclaim(self, queue: str, holder: str, page: int, how: int) -> bytes:
        """The command that gives a page of what a holder had back; `how` it ended."""
        engine, settings = self._engine, self._engine.settings
        return script("reclaim").call(
            engine.keys.whole(queue), GROUP, holder, engine.limit_of(queue), page, settings.dead_letter_max_count,
            int(settings.dead_letter_max_age * 1000), how, *engine.steps)

    def expired(self, queue: str, commands: Commands) -> None:
        """The registered time of a transient queue is over: drop its rows, or correct the time."""
        engine = self._engine
        left = commands.call("PTTL", engine.keys.stream(queue, 0))
        if left > 0:
            commands.call("ZADD", engine.keys.timers, f"{time.time() * 1000 + left:.0f}", f"q\n{queue}")
            return
        self.dropped(queue, commands)
        logger.debug("transient queue %s is gone", queue)

    def dropped(self, queue: str, commands: Commands) -> None:
        """Remove what the tables say of a queue."""
        engine = self._engine
        commands.script("table_drop", [engine.keys.owned(queue), engine.keys.timers, *engine.keys.guard], queue,
                        f"{engine.keys.common}:")
        RedisTable(commands, engine.keys, "queues").delete([queue])
        self._transient.pop(queue, None)
