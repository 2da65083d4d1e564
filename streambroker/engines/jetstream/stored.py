"""Looking at what streams hold without a consumer: requests to the stream's leader, many at once. Coroutines are for
the link's thread, everything else blocks and is for all others.
"""

from __future__ import annotations

import asyncio
import base64
import heapq
import json
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from .api import MESSAGE_NOT_FOUND, ApiError
from .frames import read_headers
from .streams import posix

if TYPE_CHECKING:
    from .engine import JetStreamEngine

T = TypeVar("T")

#: requests that are under way at once
WINDOW = 100
#: subjects in one answer of the server
PAGE = 100_000


@dataclass(frozen=True, slots=True)
class Stored:
    """One message of a stream. `time` is the POSIX time at which it was stored."""

    subject: str
    sequence: int
    data: bytes
    headers: Mapping[str, str]
    time: float


def run(engine: JetStreamEngine, work: Callable[[], Coroutine[Any, Any, T]], limit: float | None = None) -> T:
    """The result of a coroutine that makes requests, within `limit` seconds; by default with the patience of a publish.
    Raises ApiError, StoreConnectionError."""
    settings = engine.settings
    if not engine.link.connected:
        engine.link.open(settings.publish_timeout if limit is None else limit)
    return engine.link.run(work, settings.publish_timeout + settings.socket_timeout if limit is None else limit)


async def ask(engine: JetStreamEngine, request: str, body: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """The answer of the API, with the patience of a publish; None when the server says that it is not there."""
    try:
        return await engine.api.acall(request, body, patience=engine.settings.publish_timeout,
                                      timeout=engine.settings.socket_timeout)
    except ApiError as error:
        if error.missing:
            return None
        raise


async def ask_all(engine: JetStreamEngine, request: str, bodies: Sequence[Mapping[str, Any]]) -> list[
        dict[str, Any] | None]:
    found: list[dict[str, Any] | None] = []
    for start in range(0, len(bodies), WINDOW):
        found += await asyncio.gather(*(ask(engine, request, body) for body in bodies[start:start + WINDOW]))
    return found


async def get(engine: JetStreamEngine, stream: str, query: Mapping[str, Any]) -> Stored | None:
    """One message: `{"seq": n}`, `{"seq": n, "next_by_subj": filter}` or `{"last_by_subj": filter}`."""
    answer = await ask(engine, f"STREAM.MSG.GET.{stream}", query)
    return None if answer is None else _read(answer)


async def get_all(engine: JetStreamEngine, stream: str, queries: Sequence[Mapping[str, Any]]) -> list[Stored | None]:
    answers = await ask_all(engine, f"STREAM.MSG.GET.{stream}", queries)
    return [None if answer is None else _read(answer) for answer in answers]


def _read(answer: Mapping[str, Any]) -> Stored:
    message = answer["message"]
    headers: Mapping[str, str] = {}
    if message.get("hdrs"):
        _, headers = read_headers(base64.b64decode(message["hdrs"]))
    return Stored(message["subject"], int(message["seq"]), base64.b64decode(message.get("data") or ""), headers,
                  posix(message["time"]))


async def subjects(engine: JetStreamEngine, stream: str, covered: str) -> dict[str, int]:
    """Subjects of a stream that a filter covers, with the number of messages on each; empty when there is no stream."""
    found: dict[str, int] = {}
    while True:
        info = await ask(engine, f"STREAM.INFO.{stream}", {"subjects_filter": covered, "offset": len(found)})
        page = (info or {}).get("state", {}).get("subjects") or {}
        before = len(found)
        found.update(page)
        if len(page) < PAGE or len(found) == before:
            return found


def walk(engine: JetStreamEngine, stream: str, covered: str) -> Iterator[Stored]:
    """Messages of a stream that a filter covers, oldest first, as they are when their turn comes.

    The server finds only the next message after a sequence, so one after the other would be slow: the range is searched
    in parts that are split as long as there are few of them.
    """
    # servers before 2.12 may know of no last message of a subject from which some were deleted
    info = run(engine, lambda: ask(engine, f"STREAM.INFO.{stream}"))
    if info is None or not info["state"]["messages"]:
        return
    parts = [(int(info["state"]["first_seq"]), int(info["state"]["last_seq"]))]
    waiting: list[tuple[int, Stored]] = []
    while parts:
        turn, parts = parts[:WINDOW], parts[WINDOW:]
        answers = _get_all_here(engine, stream, [{"seq": start, "next_by_subj": covered} for start, _ in turn])
        rest: list[tuple[int, int]] = []
        for (_, end), found in zip(turn, answers, strict=True):
            if found is None or found.sequence > end:
                continue
            heapq.heappush(waiting, (found.sequence, found))
            if found.sequence < end:
                rest.append((found.sequence + 1, end))
        parts = _split(rest, WINDOW - len(rest)) + parts
        while waiting and (not parts or waiting[0][0] < parts[0][0]):
            yield heapq.heappop(waiting)[1]


def _get_all_here(engine: JetStreamEngine, stream: str, queries: Sequence[Mapping[str, Any]]) -> list[Stored | None]:
    """As `get_all`, with most of the work in this thread: the link's has leases to renew."""
    frames = [engine.api.frame(f"STREAM.MSG.GET.{stream}", query) for query in queries]
    found: list[Stored | None] = []
    for query, reply in zip(queries, engine.link.requests(frames, engine.settings.socket_timeout), strict=True):
        answer = json.loads(reply.data) if reply is not None and not reply.status else {}
        if "message" in answer:
            found.append(_read(answer))
        elif answer.get("error", {}).get("err_code") == MESSAGE_NOT_FOUND:
            found.append(None)
        else:
            found.append(run(engine, partial(get, engine, stream, query)))
    return found


def _split(parts: list[tuple[int, int]], more: int) -> list[tuple[int, int]]:
    """As many of the longest ones halved."""
    longest = sorted(parts, key=lambda part: part[0] - part[1])[:max(more, 0)]
    halved = {part for part in longest if part[1] > part[0]}
    found = []
    for start, end in parts:
        if (start, end) in halved:
            middle = (start + end) // 2
            found += [(start, middle), (middle + 1, end)]
        else:
            found.append((start, end))
    return found
