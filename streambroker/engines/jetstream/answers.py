"""Requests that wait for their answers: all reply to one wildcard inbox, told apart by a number."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Protocol

from .frames import Reply


class Asker(Protocol):
    def answer(self, index: int, reply: Reply | None) -> None:
        """In the loop's thread. None: the link broke."""


class Bell(Protocol):
    def set(self) -> object: ...


class Batch:
    """Requests of one thread or coroutine, which waits for `bell`."""

    def __init__(self, count: int, bell: Bell) -> None:
        self.replies: list[Reply | None] = [None] * count
        self._left = count
        self._bell = bell

    def answer(self, index: int, reply: Reply | None) -> None:
        self.replies[index] = reply
        self._left -= 1
        if not self._left:
            self._bell.set()


class Ask:
    """One request of a coroutine."""

    def __init__(self, future: asyncio.Future[Reply | None]) -> None:
        self._future = future

    def answer(self, index: int, reply: Reply | None) -> None:
        if not self._future.done():
            self._future.set_result(reply)


class Answers:
    """Who waits for which number. Any thread adds and removes; answers come in the loop's thread."""

    def __init__(self, inbox: str) -> None:
        self.inbox = inbox
        self._start = len(inbox) + 1
        self._numbers = itertools.count(1)
        self._askers: dict[str, tuple[Asker, int, str]] = {}

    @property
    def waiting(self) -> int:
        return len(self._askers)

    def add(self, asker: Asker, index: int, subject: str) -> str:
        """The token of a new request to `subject`, for `remove`; its reply subject is inbox.token."""
        token = str(next(self._numbers))
        self._askers[token] = asker, index, subject.lower()
        return token

    def remove(self, tokens: Sequence[str]) -> None:
        for token in tokens:
            self._askers.pop(token, None)

    def take(self, reply: Reply) -> None:
        """An answer came; too late when nobody waits any more."""
        entry = self._askers.pop(reply.subject[self._start:], None)
        if entry is not None:
            entry[0].answer(entry[1], reply)

    def refuse(self, subject: str, text: str) -> None:
        """The server takes nothing on `subject` from us: it answers with an error and no more."""
        for token, (asker, index, asked) in self._askers.copy().items():
            if asked == subject:
                self.remove([token])
                asker.answer(index, Reply(subject, b"", "", 403, {"Description": text}))

    def fail(self) -> None:
        """The link broke."""
        while self._askers:
            try:
                _, (asker, index, _) = self._askers.popitem()
            except KeyError:
                return  # removed by its own thread
            asker.answer(index, None)
