"""Values by key that expire, kept by JetStream: results of jobs, and what belongs to them."""

from __future__ import annotations

import itertools
import logging
import math
import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from .. import fork
from ..engines.jetstream.address import CLIENT_OPTIONS, Address
from ..engines.jetstream.api import PAUSES, WRONG_SEQUENCE, Api, ApiError
from ..engines.jetstream.frames import Frame, Reply
from ..engines.jetstream.link import Link
from ..errors import AuthenticationError, StoreConnectionError, StoreError
from ..settings import JetStreamSettings, read_settings
from .stream import MESSAGE_ID, ResultStream, Stored
from .watch import Watch, Watcher

logger = logging.getLogger(__name__)

T = TypeVar("T")
#: a request, and what to make of its answer
Question = tuple[Frame, Callable[["Reply | None"], T]]

__all__ = ["Conflict", "ResultStore", "Stored", "shared"]

#: how long one try waits for its answer (seconds); all that is asked here may be asked again
_TRY = 3.0
#: the same when there is no patience
_LEAST = 0.5
#: subjects that the server lists at once
_PAGE = 100_000


class Conflict(StoreError):
    """Somebody else has put a value meanwhile."""


class ResultStore:
    """Values by key and sets of values, on one stream of a JetStream server.

    Thread-safe, for greenlets too; in a forked child it starts anew. Connects at first use. `expires` is how many
    seconds a value lives unless its put says otherwise, None or 0: for ever; `max_age` the longest of all that will be
    asked for (default `expires`); it grows when more is. Servers before 2.11 know no time of a single value: there all
    live for `max_age`.
    `options` are those of `JetStreamSettings` and of the client. Raises ConfigurationError.

    Methods try for `patience` seconds (default: the option `publish_timeout`) to get over a broken link, a restart, an
    election, and raise StoreConnectionError then; StoreError when the store refuses.
    """

    def __init__(self, url: str, *, expires: float | None = 86400.0, max_age: float | None = None,
                 **options: Any) -> None:
        client = {name: value for name, value in options.items() if name in CLIENT_OPTIONS}
        self.settings = read_settings({name: value for name, value in options.items() if name not in client},
                                      JetStreamSettings)
        self.address = Address(url, client)
        self.expires = expires or 0.0
        self.link = Link(self.address, self.settings)
        self.api = Api(self.link, self.settings)
        self.stream = ResultStream(self.api, self.settings, self.expires if max_age is None else max_age)
        self._watcher = Watcher(self.link, self.stream)
        self._puts = itertools.count(1)
        self._start()
        fork.register(self)

    def __repr__(self) -> str:
        return f"<ResultStore {self.address} prefix {self.settings.prefix!r}>"

    def _start(self) -> None:
        self._name = secrets.token_hex(8)
        self.link.on_connect.append(self._connected)

    def _connected(self) -> None:
        self.stream.forget()
        self._watcher.connected()

    # Values

    def put(self, key: str, value: bytes, *, expires: float | None = None, expected: int | None = None,
            patience: float | None = None) -> int:
        """Store a value in place of the one before; its sequence, when the server has it. With `expected`, raises
        Conflict unless that is the sequence of the present value, 0: there is none. Raises MessageTooLarge."""
        return self.put_at(self.stream.value(key), value, expires=expires, expected=expected, patience=patience)

    def get(self, key: str, *, patience: float | None = None) -> Stored | None:
        """The value, None when there is none, not yet or not any more."""
        return self.get_many([key], patience=patience)[0]

    def get_many(self, keys: Sequence[str], *, patience: float | None = None) -> list[Stored | None]:
        """The values in the order of the keys."""
        return self.get_at([self.stream.value(key) for key in keys], patience=patience)

    def update(self, key: str, change: Callable[[bytes | None], bytes | None], *, expires: float | None = None,
               patience: float | None = None) -> Stored | None:
        """Put what `change` makes of the present value, None when there is none; nothing when it gives None. Nobody's
        change is lost: it is called again, with a newer value, when somebody else was faster. What is stored then."""
        old: Stored | None = None
        tries = 0
        # the first try supposes that there is nothing yet: that is one round trip for most results
        while (new := change(old.value if old else None)) is not None:
            try:
                return Stored(new, self.put(key, new, expires=expires, expected=old.sequence if old else 0,
                                            patience=patience))
            except Conflict:
                time.sleep(random.uniform(0, 0.002 * min(tries, 10)))
                old = self.get(key, patience=patience)
                tries += 1
        return old

    def delete(self, keys: Sequence[str], *, patience: float | None = None) -> None:
        """Forget the values of these keys, if any."""
        self.purge([self.stream.value(key) for key in keys], patience=patience)

    # Waiting

    def watch(self) -> Watch:
        """Tells of values as they are put. To be closed, or used as a context manager."""
        return Watch(self._watcher)

    def wait(self, key: str, timeout: float | None = None,
             wanted: Callable[[Stored], bool] = lambda value: True) -> Stored | None:
        """The value as soon as there is one that is wanted; None after `timeout` seconds. Nothing is polled, and
        a store that is away is waited for."""
        try:
            found = self.get(key, patience=0)
        except AuthenticationError:
            raise
        except StoreConnectionError as error:
            logger.debug("waiting for the store: %s", error)
            found = None
        if found is not None and wanted(found):
            return found
        end = math.inf if timeout is None else time.monotonic() + timeout
        with self.watch() as watch:
            watch.add({key: 0})
            while (left := end - time.monotonic()) > 0:
                for _, value in reversed(watch.take(left)):
                    if wanted(value):
                        return value
        return None

    # Any subject of the stream

    def put_at(self, subject: str, value: bytes, *, expires: float | None = None, expected: int | None = None,
               patience: float | None = None) -> int:
        put = f"{self._name}-{next(self._puts)}"
        life = self.expires if expires is None else expires
        self.stream.allow(life)

        def question() -> list[Question[int]]:
            headers = {MESSAGE_ID: put}
            if expected is not None:
                headers["Nats-Expected-Last-Subject-Sequence"] = str(expected)
            if self.stream.has_ttl:
                headers["Nats-TTL"] = f"{math.ceil(life)}s" if life else "never"
            return [(Frame(subject, value, "", headers), lambda reply: int(self.stream.check("storing", reply)["seq"]))]

        try:
            return self.ask(question, patience)[0]
        except ApiError as error:
            if error.code != WRONG_SEQUENCE:
                raise
        # newer servers refuse the repeat of a put whose answer was lost, instead of knowing it again
        present = self.get_at([subject], patience=patience)[0]
        if present is not None and present.put == put:
            return present.sequence
        raise Conflict(f"{subject} has another value meanwhile")

    def get_at(self, subjects: Sequence[str], *, patience: float | None = None) -> list[Stored | None]:
        return self.ask(lambda: [(self.stream.get(subject), self.stream.read) for subject in subjects], patience)

    def purge(self, filtered: Sequence[str], *, patience: float | None = None) -> None:
        self.ask(lambda: [(self.stream.purge(each), partial(self.stream.check, "deleting")) for each in filtered],
                 patience)

    def subjects_at(self, filtered: str, *, patience: float | None = None) -> list[str]:
        """The subjects that have a value, sorted."""
        found: dict[str, Any] = {}
        while True:
            offset = len(found)
            frame = self.stream.subjects(filtered, offset)
            answer = self.ask(lambda: [(frame, partial(self.stream.check, "listing"))], patience)[0]  # noqa: B023
            found.update(answer["state"].get("subjects") or {})
            if len(found) - offset < _PAGE:
                return sorted(found)

    def ask(self, questions: Callable[[], Sequence[Question[T]]], patience: float | None = None) -> list[T]:
        """The answers in order, when all are there. What got none is asked again."""
        end = time.monotonic() + (self.settings.publish_timeout if patience is None else patience)
        answers: dict[int, T] = {}
        tries = 0
        while True:
            try:
                self._ask(questions, answers, min(max(end - time.monotonic(), _LEAST), _TRY))
                return [answers[index] for index in sorted(answers)]
            except StoreConnectionError as error:
                pause = PAUSES[min(tries, len(PAUSES) - 1)]
                if isinstance(error, AuthenticationError) or time.monotonic() + pause >= end:
                    raise
            self.stream.forget()
            tries += 1
            time.sleep(pause)

    def _ask(self, questions: Callable[[], Sequence[Question[T]]], answers: dict[int, T], timeout: float) -> None:
        """One try; raises the last reason why some are not answered."""
        if not self.stream.known:
            self.link.open(timeout)
            self.link.run(self.stream.aensure, timeout)
        asked = questions()
        wanted = [index for index in range(len(asked)) if index not in answers]
        replies = self.link.requests([asked[index][0] for index in wanted], timeout)
        problem: StoreConnectionError | None = None
        for index, reply in zip(wanted, replies, strict=True):
            try:
                answers[index] = asked[index][1](reply)
            except StoreConnectionError as error:
                problem = error
        if problem is not None:
            raise problem

    # Life

    def close(self, timeout: float = 2.0) -> None:
        """Disconnect, for good. Waiters wait for their timeouts."""
        self.link.close(timeout)

    def after_fork(self) -> None:
        self.link.after_fork()
        self.stream.forget()
        self._watcher.reset()
        self._start()


_shared: dict[Any, ResultStore] = {}


def shared(url: str, options: Mapping[str, Any], *, expires: float | None, max_age: float | None) -> ResultStore:
    """The store of this process for that place and these options; it lives as long as the process."""
    key = url, repr(sorted(options.items())), expires, max_age
    # no lock, which a fork could copy while it is held: a store that lost the race was never used
    return _shared.get(key) or _shared.setdefault(key, ResultStore(url, expires=expires, max_age=max_age, **options))
