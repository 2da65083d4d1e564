"""What queues there are, and how each behaves. Durable ones are rows of a shared table, a transient one is a consumer
of the interest stream: while it is there messages are kept for it, and the server removes both when its time is over.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from ...message import QueueSpec
from .api import CONSUMER_EXISTS, ApiError
from .names import untoken
from .stored import run, subjects
from .streams import NANO

if TYPE_CHECKING:
    from .engine import JetStreamEngine

#: how long what was learnt of a queue counts (seconds)
FRESH = 5.0
#: metadata of a transient queue's consumer: its spec
SPEC = "spec"


class Queues:
    """Thread-safe; blocks, so not for the link's thread."""

    def __init__(self, engine: JetStreamEngine) -> None:
        self._engine = engine
        self.table = engine.table("queues")
        self._steps = engine.table("steps")
        self._learnt: dict[str, tuple[float, QueueSpec | None]] = {}
        #: by this process
        self._declared: dict[str, QueueSpec] = {}
        self._told: dict[tuple[str, int], float] = {}
        self._toggle = 0
        self._seen: tuple[int, float] | None = None

    # Specs

    def declare(self, spec: QueueSpec) -> None:
        if spec.durable:
            self._engine.streams.ensure(self._engine.names.stream(spec.name), spec.name)
            known = self._learnt.get(spec.name)
            if known is None or known[1] != spec or time.monotonic() - known[0] > FRESH:
                self.table.put(spec.name, _dump(spec))
        else:
            self._declare_transient(spec)
        self._declared[spec.name] = spec
        self._learnt[spec.name] = time.monotonic(), spec

    def restore(self, queue: str) -> None:
        """Declare a durable one again as this process did, where the store has lost that."""
        spec = self._declared.get(queue)
        if spec is not None and spec.durable and queue not in self.table.rows():
            self.table.put(queue, _dump(spec))

    def _declare_transient(self, spec: QueueSpec) -> None:
        engine, names = self._engine, self._engine.names
        engine.streams.ensure(names.transient)
        durable = names.transient_durable(spec.name)
        # the server counts the idle time of a pull consumer anew only when its configuration changes
        self._toggle ^= 1
        idle = 0 if spec.expires is None else int(spec.expires * NANO) + self._toggle * 1_000_000
        config = {
            "durable_name": durable, "name": durable, "filter_subject": names.brief(spec.name, "*"),
            "deliver_policy": "all", "ack_policy": "explicit", "ack_wait": int(engine.lease * NANO),
            "max_deliver": -1, "max_ack_pending": -1, "max_waiting": 4096, "replay_policy": "instant",
            "inactive_threshold": idle, "metadata": {SPEC: _dump(spec)}}
        request = f"CONSUMER.DURABLE.CREATE.{names.transient}.{durable}"
        body = {"stream_name": names.transient, "config": config}
        try:
            engine.api.call(request, body)
        except ApiError as error:
            if error.missing:
                engine.streams.forget(names.transient)
                engine.streams.ensure(names.transient)
            elif error.code != CONSUMER_EXISTS:
                raise
            engine.api.call(request, body)

    def spec(self, queue: str) -> QueueSpec | None:
        """As declared by anyone; asks the store."""
        spec = self._transient_spec(queue)
        if spec is None:
            text = self.table.rows().get(queue)
            spec = None if not text else _load(text)
        self._learnt[queue] = time.monotonic(), spec
        return spec

    def _transient_spec(self, queue: str) -> QueueSpec | None:
        names = self._engine.names
        try:
            answer = self._engine.api.call(
                f"CONSUMER.INFO.{names.transient}.{names.transient_durable(queue)}")
        except ApiError as error:
            if error.missing:
                return None
            raise
        text = answer["config"].get("metadata", {}).get(SPEC, "")
        return _load(text) if text else QueueSpec(queue, durable=False)

    async def transient_names(self) -> set[str]:
        """Those that are there; in the link's thread."""
        names, api = self._engine.names, self._engine.api
        found: set[str] = set()
        offset = 0
        while True:
            try:
                page = await api.acall(f"CONSUMER.NAMES.{names.transient}", {"offset": offset})
            except ApiError as error:
                if error.missing:
                    return found
                raise
            tokens = page.get("consumers") or []
            for each in tokens:
                name = untoken(each)
                found.add(await self._hashed_name(each) if name is None else name)
            offset += len(tokens)
            if not tokens or offset >= int(page.get("total", 0)):
                return found - {""}

    async def _hashed_name(self, durable: str) -> str:
        try:
            answer = await self._engine.api.acall(f"CONSUMER.INFO.{self._engine.names.transient}.{durable}")
        except ApiError as error:
            if error.missing:
                return ""
            raise
        spec = _load(answer["config"].get("metadata", {}).get(SPEC, ""))
        return spec.name if spec is not None else ""

    def learn(self, queue: str) -> QueueSpec | None:
        """The spec as known for some seconds at most."""
        known = self._learnt.get(queue)
        if known is None or time.monotonic() - known[0] > FRESH:
            return self.spec(queue)
        return known[1]

    def known(self, queue: str) -> QueueSpec | None:
        """The spec as learnt last, without asking."""
        found = self._learnt.get(queue)
        return found[1] if found else None

    def is_transient(self, queue: str) -> bool:
        spec = self.known(queue)
        return spec is not None and not spec.durable

    def remove(self, queue: str) -> None:
        """Nothing of it is to be known any more."""
        self.table.delete([queue])
        self._steps.delete([f"{step}:{queue}" for step in self._engine.steps if step])
        self._learnt.pop(queue, None)
        self._declared.pop(queue, None)
        self._told = {pair: when for pair, when in self._told.items() if pair[0] != queue}

    def limit_of(self, queue: str) -> int:
        spec = self.known(queue)
        own = None if spec is None else spec.delivery_limit
        return (self._engine.settings.delivery_limit if own is None else own) or 0

    # Priority steps

    def tell_step(self, queue: str, step: int) -> None:
        """Before the first message of a step: consumers ask the server only for the steps that were ever used."""
        if step and time.monotonic() - self._told.get((queue, step), float("-inf")) > FRESH:
            # the table may be lost
            if self._steps.put(f"{step}:{queue}", ""):
                self._engine.tell({"steps": queue})
            self._told[queue, step] = time.monotonic()

    def steps(self, queue: str, max_age: float = 0.0) -> list[int]:
        """Steps that were ever used, the first one always."""
        rows, names = self._steps.rows(max_age), self._engine.names
        stored = run(self._engine, partial(subjects, self._engine, names.stream(queue), names.ready(queue, "*")))
        return [0, *(step for step in self._engine.steps
                     if step and (f"{step}:{queue}" in rows or names.ready(queue, step) in stored))]

    async def steps_changed(self) -> bool:
        """Whether there are others than at the last time; in the link's thread."""
        before, self._seen = self._seen, (await self._steps.look()).version
        return self._seen != before


def _dump(spec: QueueSpec) -> str:
    return json.dumps(asdict(spec), sort_keys=True)


def _load(text: str) -> QueueSpec | None:
    try:
        found: dict[str, Any] = json.loads(text)
        return QueueSpec(**found)
    except (ValueError, TypeError):
        return None
