"""Requests to the JetStream API: JSON, over the link."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...errors import AuthenticationError, StoreConnectionError, StoreError, StoreUnavailable
from .frames import Frame, Reply
from .link import Link

if TYPE_CHECKING:
    from ...settings import JetStreamSettings

#: error codes of the server (its errors.json)
STREAM_NOT_FOUND, CONSUMER_NOT_FOUND, MESSAGE_NOT_FOUND = 10059, 10014, 10037
STREAM_EXISTS, WRONG_SEQUENCE, NO_MESSAGE = 10058, 10071, 10057
CONSUMER_EXISTS, CONSUMER_MOVED = 10148, 10012
#: codes that mean "not now": no leader, no quorum, no room
NOT_NOW = frozenset({10008, 10009, 10023, 10028, 10047, 10077, 10118})
#: how long the tries of one request wait for an answer, again and again: who died does not answer, and the next leader
#: only what it is asked then; but a busy one needs its time (seconds)
WAITS = (1.0, 1.0, 1.0, 3.0)
#: how long a single try waits (seconds)
ONCE = 5.0
#: however little patience there is, an answer may take so long (seconds)
LEAST = 0.5
#: pauses between tries while nobody answers
PAUSES = (0.05, 0.1, 0.2, 0.5)
NOBODY = "nobody answers for JetStream: it is not enabled for this account, or there is no leader"


class ApiError(StoreError):
    """The server refused a request. `code` is its `err_code`."""

    def __init__(self, request: str, code: int, text: str) -> None:
        super().__init__(f"{request}: {text} (error {code})")
        self.code = code

    @property
    def missing(self) -> bool:
        return self.code in (STREAM_NOT_FOUND, CONSUMER_NOT_FOUND, MESSAGE_NOT_FOUND, NO_MESSAGE)


class Api:
    """Thread-safe. `call` blocks and is for every thread but the link's own, `acall` is for that one."""

    def __init__(self, link: Link, settings: JetStreamSettings) -> None:
        self._link = link
        self._settings = settings
        self.prefix = settings.api_prefix or (f"$JS.{settings.domain}.API" if settings.domain else "$JS.API")

    def frame(self, request: str, body: Mapping[str, Any] | None = None) -> Frame:
        return Frame(f"{self.prefix}.{request}", b"" if body is None else json.dumps(body).encode())

    def call(self, request: str, body: Mapping[str, Any] | None = None, *, patience: float | None = None,
             timeout: float | None = None) -> dict[str, Any]:
        """The answer. Tries again for `patience` seconds (default `publish_timeout`) while the link is broken or nobody
        answers. Raises ApiError, StoreConnectionError, StoreUnavailable."""
        frame = self.frame(request, body)
        end = time.monotonic() + (self._settings.publish_timeout if patience is None else patience)
        tries = 0
        while True:
            try:
                wait = timeout or min(self._settings.socket_timeout, WAITS[tries % len(WAITS)],
                                      max(LEAST, end - time.monotonic()))
                return self.read(request, self._link.request(frame, wait))
            except AuthenticationError:
                raise
            except StoreConnectionError:
                pause = PAUSES[min(tries, len(PAUSES) - 1)]
                if time.monotonic() + pause >= end:
                    raise
            tries += 1
            time.sleep(pause)

    async def acall(self, request: str, body: Mapping[str, Any] | None = None, *, patience: float = 0.0,
                    timeout: float | None = None) -> dict[str, Any]:
        frame = self.frame(request, body)
        end = time.monotonic() + patience
        tries = 0
        while True:
            try:
                wait = timeout or (WAITS[tries % len(WAITS)] if patience else ONCE)
                return self.read(request, await self._link.ask(frame, wait))
            except AuthenticationError:
                raise
            except StoreConnectionError:
                pause = PAUSES[min(tries, len(PAUSES) - 1)]
                if time.monotonic() + pause >= end:
                    raise
            tries += 1
            await asyncio.sleep(pause)

    @staticmethod
    def read(request: str, reply: Reply) -> dict[str, Any]:
        """What an answer of JSON says. Raises ApiError when it refuses, StoreUnavailable when it means "not now",
        StoreError when it is none."""
        if reply.status == 503:
            raise StoreUnavailable(NOBODY)
        if reply.status:
            raise StoreError(f"{request}: {reply.description or reply.status}")
        answer: dict[str, Any] = json.loads(reply.data)
        error = answer.get("error")
        if error:
            code, text = int(error.get("err_code", error.get("code", 0))), str(error.get("description", ""))
            if code in NOT_NOW:
                raise StoreUnavailable(f"{request}: {text} (error {code})")
            raise ApiError(request, code, text)
        return answer
