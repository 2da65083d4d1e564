"""How Celery waits for results: in the thread or greenlet that asked, woken by the store, without polling.

Each `get` watches the tasks it waits for and nothing else, so any number of threads wait side by side. Callbacks of
`AsyncResult.then` run in whoever waits for that result; under gevent and eventlet also by themselves, in Celery's own
greenlet for that.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from celery import states
from celery.backends.asynchronous import BaseResultConsumer, greenletDrainer
from celery.exceptions import TimeoutError as CeleryTimeoutError
from celery.result import ResultSet
from kombu.exceptions import KombuError

from ..errors import AuthenticationError, StoreConnectionError, StreambrokerError

if TYPE_CHECKING:
    from celery.result import AsyncResult

    from ..results.store import Stored
    from ..results.watch import Watch

logger = logging.getLogger(__name__)

#: seconds after which `on_interval` is called while nothing comes
INTERVAL = 1.0


class ResultConsumer(BaseResultConsumer):
    """Of one backend. Thread-safe."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        #: whether a greenlet of Celery's handles what nobody waits for
        self.drains = isinstance(self.drainer, greenletDrainer)
        self._unattended: Watch | None = None
        self._pid = os.getpid()

    def _wait_for_pending(self, result: Any, timeout: float | None = None,
                          on_interval: Callable[[], object] | None = None,
                          on_message: Callable[[Any], object] | None = None,
                          **kwargs: Any) -> Iterator[list[AsyncResult]]:
        """Ends when `result`, one or a set of them, is ready; yields those of its results that have become so. Raises
        celery.exceptions.TimeoutError."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        left: dict[str, list[AsyncResult]] = {}
        for each in _leaves(result):
            left.setdefault(self.backend.get_key_for_task(each.id), []).append(each)
        present = self._present(left)
        seen = {key: value.sequence for key, value in present}
        yield self._take(present, left, on_message)
        if result.on_ready.ready:
            return
        with self.backend.store.watch() as watch:
            watch.add({key: seen.get(key, 0) for key in left})
            while not result.on_ready.ready:
                remaining = end - time.monotonic()
                if remaining <= 0:
                    raise CeleryTimeoutError("The operation timed out.")
                before = set(left)
                yield self._take(watch.take(min(remaining, INTERVAL)), left, on_message)
                watch.discard(before - left.keys())
                if on_interval:
                    on_interval()

    def _present(self, left: Iterable[str]) -> list[tuple[str, Stored]]:
        keys = list(left)
        try:
            found = self.backend.store.get_many(keys, patience=0) if keys else []
        except AuthenticationError:
            raise
        except StoreConnectionError as error:
            logger.debug("waiting for the store: %s", error)
            return []
        return [(key, value) for key, value in zip(keys, found, strict=True) if value is not None]

    def _take(self, news: Iterable[tuple[str, Stored]], left: dict[str, list[AsyncResult]],
              on_message: Callable[[Any], object] | None) -> list[AsyncResult]:
        """Results that are ready by the news; their keys are removed from `left`."""
        ready: list[AsyncResult] = []
        for key, value in news:
            if key not in left:
                continue
            meta = self.backend.decode_result(value.value)
            if on_message:
                on_message(meta)
            if meta["status"] in states.READY_STATES:
                mine = left.pop(key)
                self._settle(meta, mine)
                ready += mine
        return ready

    def _settle(self, meta: dict[str, Any], mine: Iterable[AsyncResult] = ()) -> None:
        if any(meta["task_id"] in pending for pending in self._pending_results):
            self.on_state_change(meta, None)
        for each in mine:
            # versions before 5.7 keep one object a task; this may be another one
            if each._cache is None:
                each._maybe_set_cache(meta)

    # Under gevent and eventlet: what `then` was called for and nobody waits for

    def consume_from(self, task_id: str) -> None:
        if self.drains:
            if self._unattended is None or self._pid != os.getpid():
                self._pid = os.getpid()
                self._unattended = self.backend.store.watch()
            self._unattended.add({self.backend.get_key_for_task(task_id): 0})

    def cancel_for(self, task_id: str) -> None:
        """Takes no lock: results call it from their finalizers."""
        if self._unattended is not None:
            self._unattended.discard([self.backend.get_key_for_task(task_id)])

    def drain_events(self, timeout: float | None = None) -> None:
        """Called over and over by Celery's greenlet, which does not survive an exception."""
        watch = self._unattended
        if watch is None:
            time.sleep(timeout or 0)
            return
        try:
            news = watch.take(INTERVAL if timeout is None else timeout)
        except StreambrokerError as error:
            logger.warning("callbacks of results wait: %s", error)
            time.sleep(INTERVAL)
            return
        for key, value in news:
            try:
                meta = self.backend.decode_result(value.value)
            except (KombuError, ValueError, TypeError) as error:
                logger.warning("the result %s cannot be read: %s", key, error)
                continue
            if meta["status"] in states.READY_STATES:
                self._settle(meta)


def _leaves(result: Any) -> Iterator[AsyncResult]:
    """The single results in it that are not known yet."""
    if isinstance(result, ResultSet):
        for each in result.results:
            yield from _leaves(each)
    elif not result._cache:
        yield result
