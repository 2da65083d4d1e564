"""Rows of shared tables that belong to a transient queue go when it goes; traces of removed rows go after a while, and
books whose message is gone. Messages that are stranded are looked for."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING

from ...errors import StoreConnectionError, StoreError
from .api import WRONG_SEQUENCE, ApiError
from .link import Listener, Reply
from .rows import REMOVED, Row, Rows, View, removal
from .stored import ask, ask_all, run, subjects

if TYPE_CHECKING:
    from .engine import JetStreamEngine

#: between two looks for rows whose queue is gone; after the start the second one is soon (seconds)
SWEEP, FIRST = 60.0, 1.0
#: longest pause before rows of a queue are removed whose end was told: one process may do it for all (seconds)
POLITE = 0.6
#: names of consumers in one answer of the server
PAGE = 1024


class RowJanitor:
    """Of one engine. Every consuming process has one: what several do at once, the server does once."""

    def __init__(self, engine: JetStreamEngine) -> None:
        self._engine = engine
        self._rows = Rows(engine, engine.names.rows())
        self._running = False
        self._listener: Listener | None = None
        self._listening = False
        self._told: set[str] = set()
        self._wake = asyncio.Event()
        #: queues that were not there at the last look
        self._missing: set[str] = set()

    # ------------------------------------------------------------------ in the link's thread
    def start(self) -> None:
        if not self._running:
            self._running = True
            self._engine.link.spawn(self._run())

    def stop(self) -> None:
        self._running = False
        if self._listener is not None:
            self._listener.close()
        self._wake.set()

    def soon(self) -> None:
        """Somebody ended who may have left something."""
        self._wake.set()

    async def _run(self) -> None:
        pause = FIRST
        while self._running:
            self._wake.clear()
            try:
                await self._listen()
                if self._told:
                    told, self._told = self._told, set()
                    await self._check(told)
                else:
                    await self._sweep()
            except (StoreConnectionError, StoreError) as error:
                self._engine.chores.report(f"what is left behind is looked for later: {error}", calm=True)
            if not self._told:
                try:
                    await asyncio.wait_for(self._wake.wait(), pause)
                    await asyncio.sleep(random.uniform(0.0, POLITE))
                except asyncio.TimeoutError:
                    pause = SWEEP * random.uniform(0.8, 1.0)

    async def _listen(self) -> None:
        if self._listening:
            return
        subject = f"$JS.EVENT.ADVISORY.CONSUMER.DELETED.{self._engine.names.transient}.*"
        try:
            self._listener = await self._engine.link.alisten(subject, self._deleted)
        except StoreError as error:
            self._engine.chores.report(f"rows of transient queues stay up to two minutes longer than they: {error}")
        self._listening = True

    def _deleted(self, reply: Reply) -> None:
        self._told.add(reply.subject.rpartition(".")[2])
        self._wake.set()

    async def _check(self, told: set[str]) -> None:
        """Remove the rows of those transient queues of which the server told that they are gone, and which are."""
        view = await self._rows.look()
        wanted = sorted(told & self._owners(view))
        stream = self._engine.names.transient
        there = await asyncio.gather(*(ask(self._engine, f"CONSUMER.INFO.{stream}.{name}") for name in wanted))
        await self._remove(view, {name for name, info in zip(wanted, there, strict=True) if info is None})

    async def _sweep(self) -> None:
        """The same for all, told or not; a queue must be missing at two looks, as an answer may be out of date."""
        view = await self._rows.look()
        owners = self._owners(view)
        missing = owners - await self._transient() if owners else set()
        await self._remove(view, missing & self._missing)
        self._missing = missing
        await self._bury(view)
        await self._engine.books.sweep()
        await self._engine.stranded.sweep()

    async def _bury(self, view: View) -> None:
        """Remove what is left of rows that were removed long ago, unless another process has."""
        engine, state = self._engine, self._engine.names.state
        before = engine.streams.now() - REMOVED
        old = {subject: row for subject, row in view.rows.items() if row.key is None and row.time < before}
        if old:
            there = await subjects(engine, state, engine.names.rows())
            await ask_all(engine, f"STREAM.MSG.DELETE.{state}",
                          [{"seq": row.sequence, "no_erase": True} for subject, row in old.items() if subject in there])
            self._rows.forget(old)

    def _owners(self, view: View) -> set[str]:
        """The transient queues that rows belong to, as names of consumers."""
        return {self._owner(row) for row in view.rows.values() if row.queue}

    def _owner(self, row: Row) -> str:
        return self._engine.names.transient_durable(row.queue)

    async def _transient(self) -> set[str]:
        names: set[str] = set()
        while True:
            page = await ask(self._engine, f"CONSUMER.NAMES.{self._engine.names.transient}", {"offset": len(names)})
            found = (page or {}).get("consumers") or []
            names.update(found)
            if len(found) < PAGE:
                return names

    async def _remove(self, view: View, gone: Collection[str]) -> None:
        engine = self._engine
        if gone:
            await engine.streams.aensure(engine.names.state)
        for subject, row in view.rows.items():
            if row.queue and self._owner(row) in gone:
                try:
                    await engine.streams.store(removal(engine, subject, row.sequence), engine.names.state)
                except ApiError as error:
                    # written again meanwhile, or removed by another process
                    if error.code != WRONG_SEQUENCE:
                        raise

    # ------------------------------------------------------------------ from any other thread
    def forget(self, queue: str) -> None:
        """Remove the rows of a transient queue that was deleted. Raises StoreError, StoreConnectionError."""
        run(self._engine, partial(self._forget, queue))

    async def _forget(self, queue: str) -> None:
        await self._remove(await self._rows.look(), {self._engine.names.transient_durable(queue)})
