"""Publishing: prepared commands, a producer's sequence so that a repeat stores nothing twice, and the choice between an
answer for each message and one publish later.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from ...errors import MessageTooLarge, StoreConnectionError
from ...message import Message
from ...settings import Settings
from .commands import Commands, Request
from .keys import GROUP, Keys
from .resp import pack_words
from .scripts import script

#: messages in one script call
PAGE = 500
#: calls whose outcome is unknown and that may be repeated
UNRESOLVED = 1000
#: queues whose prepared commands and keys are remembered
REMEMBERED = 1000

_PLAIN = pack_words("1", "", "0", GROUP)


def encode(message: Message) -> bytes:
    """One field for the whole message: length of the head (and of the id, where there is one), then all of it."""
    if not message.id:
        return b"%d:%b%b" % (len(message.head), message.head, message.body)
    name = message.id.encode("utf-8", "surrogateescape")
    return b"%d,%d:%b%b%b" % (len(message.head), len(name), name, message.head, message.body)


def decode(data: bytes, priority: int = 0) -> Message:
    """Raises ValueError when it is none of ours."""
    colon = data.index(b":", 0, 24)
    size, comma, name = data[:colon].partition(b",")
    if not size.isdigit() or comma and not name.isdigit():
        raise ValueError("no lengths at the start")
    head = colon + 1 + (int(name) if comma else 0)
    body = head + int(size)
    if body > len(data):
        raise ValueError("shorter than it says")
    return Message(data[body:], data[head:body], data[colon + 1:head].decode("utf-8", "surrogateescape"), priority)


class Producer:
    """A name with a sequence. The store keeps the last sequence of each producer and queue and skips what it has seen,
    so sequences must reach it in order: a producer ends with its first call of unknown outcome."""

    def __init__(self) -> None:
        self.name = os.urandom(6).hex()
        self.last = 0
        self.heads: dict[tuple[str, int], bytes] = {}

    def take(self, count: int) -> int:
        first = self.last + 1
        self.last += count
        return first


#: calls of unknown outcome by store and prefix: a framework may repeat one after it has closed its engine for the error
_memories: dict[tuple[str, str], dict[bytes, tuple[Producer, int]]] = {}


class Publisher:
    """Thread-safe. `on_fresh` is called, without the lock, with a queue whose stream had to be made."""

    def __init__(self, commands: Commands, keys: Keys, settings: Settings, store: str,
                 on_fresh: Callable[[str], None]) -> None:
        self._commands = commands
        self._keys = keys
        self._place = store, keys.prefix
        self._on_fresh = on_fresh
        self._deferred = settings.confirm == "deferred"
        self._largest = settings.max_message_size
        self._last_step = len(settings.priority_steps) - 1
        #: queues that drop their oldest messages beyond a number
        self.max_lengths: dict[str, int] = {}
        self._start()

    def _start(self) -> None:
        self._producer = Producer()
        self._unresolved = _memories.setdefault(self._place, {})
        self._used: set[tuple[str, str]] = set()
        self._delays = 0

    def publish(self, queue: str, messages: Sequence[Message], create: bool) -> list[str]:
        """Store all; the ids, '' where an earlier try had stored it, where it waits for its time, or where the answer
        comes later. Raises MessageTooLarge before anything is sent, StoreError, StoreConnectionError."""
        if len(messages) == 1 and create and not messages[0].delay and messages[0].expires is None \
                and queue not in self.max_lengths:
            return self._one(queue, messages[0])
        return self._several(queue, messages, create)

    def _one(self, queue: str, message: Message) -> list[str]:
        data = self._encode(message)
        step, since = self._step(message), time.monotonic()
        with self._commands.lock:
            producer, first = self._number(queue, [data], 1)
            head = producer.heads.get((queue, step)) or self._prepare(producer, queue, step)
            number = b"%d" % first
            request = Request(b"*13\r\n%b$%d\r\n%b\r\n%b$%d\r\n%b\r\n" % (
                head, len(number), number, _PLAIN, len(data), data))
            self._send([request], producer, first, queue, [data], self._deferred, since)
        return self._receipts(queue, [(request, step)])

    def _several(self, queue: str, messages: Sequence[Message], create: bool) -> list[str]:
        groups: dict[tuple[Any, ...], list[tuple[Message, bytes]]] = {}
        for message in messages:
            group: tuple[Any, ...] = ("delay",) if message.delay > 0 else ("now", self._step(message), message.expires)
            groups.setdefault(group, []).append((message, self._encode(message)))
        everything, since = [data for rows in groups.values() for _, data in rows], time.monotonic()
        with self._commands.lock:
            producer, first = self._number(queue, everything, len(everything))
            number = first
            requests: list[Request] = []
            steps: list[int | None] = []
            for group, rows in groups.items():
                build = self._delayed if group[0] == "delay" else self._ready
                for start in range(0, len(rows), PAGE):
                    part = rows[start:start + PAGE]
                    requests.append(Request(build(producer, queue, number, part, create)))
                    steps.append(None if group[0] == "delay" else group[1])
                    number += len(part)
            # without `create` the caller wants to know whether the queue is there
            self._send(requests, producer, first, queue, everything, self._deferred and create, since)
        return self._receipts(queue, list(zip(requests, steps, strict=True)))

    def _step(self, message: Message) -> int:
        return min(max(message.priority, 0), self._last_step)

    def _encode(self, message: Message) -> bytes:
        size = len(message.head) + len(message.body)
        if size > self._largest:
            raise MessageTooLarge(f"message of {size} bytes is over the limit of {self._largest} bytes "
                                  "(option max_message_size); nothing was sent")
        return encode(message)

    def _ready(self, producer: Producer, queue: str, number: int, rows: list[tuple[Message, bytes]],
               create: bool) -> bytes:
        message = rows[0][0]
        expiry = "" if message.expires is None else max(1, int(message.expires * 1000))
        keys = self._call_keys(producer, queue, self._keys.stream(queue, self._step(message)))
        return script("publish").call(keys, number, int(create), expiry, self.max_lengths.get(queue, 0), GROUP,
                                      *(data for _, data in rows))

    def _delayed(self, producer: Producer, queue: str, number: int, rows: list[tuple[Message, bytes]],
                 create: bool) -> bytes:
        words: list[Any] = [number, int(create)]
        for message, data in rows:
            self._delays += 1
            name = message.id.replace("\n", " ").encode("utf-8", "surrogateescape")
            expiry = "" if message.expires is None else max(1, int(message.expires * 1000))
            words += [f"{message.delay * 1000:.3f}", expiry,
                      b"%b\n%b.%d\n%d\n0\n" % (name, producer.name.encode(), self._delays, self._step(message)), data]
        return script("delay").call(self._call_keys(producer, queue, self._keys.delay(queue)), *words)

    def _call_keys(self, producer: Producer, queue: str, target: str) -> list[str]:
        if len(self._used) >= REMEMBERED:
            self._used.clear()
        self._used.add((queue, producer.name))
        return [target, self._keys.bell(queue), self._keys.producer(queue, producer.name),
                self._keys.stream(queue, 0)]

    def _prepare(self, producer: Producer, queue: str, step: int) -> bytes:
        _, head = script("publish").prepared(self._call_keys(producer, queue, self._keys.stream(queue, step)))
        if len(producer.heads) >= REMEMBERED:
            producer.heads.clear()
        producer.heads[queue, step] = head
        return head

    def _number(self, queue: str, everything: list[bytes], count: int) -> tuple[Producer, int]:
        """Who publishes, and the first sequence. A framework that repeats a call of unknown outcome comes with the same
        content: it gets the same sequence, and the store knows whether it has it."""
        if self._unresolved:
            known = self._unresolved.get(_digest(queue, everything))
            if known is not None:
                return known
        return self._producer, self._producer.take(count)

    def _send(self, requests: list[Request], producer: Producer, first: int, queue: str,
              everything: list[bytes], deferred: bool, since: float) -> None:
        commands = self._commands
        try:
            if deferred:
                commands.settle(0, since=since)
                for request in requests:
                    request.wanted = True
                commands.send(*requests)
                return
            commands.send(*requests)
            commands.settle(0, since=since)
        except StoreConnectionError:
            if len(self._unresolved) >= UNRESOLVED:
                self._unresolved.pop(next(iter(self._unresolved)))
            self._unresolved[_digest(queue, everything)] = producer, first
            self._producer = Producer()
            raise
        if self._unresolved:
            self._unresolved.pop(_digest(queue, everything), None)

    def _receipts(self, queue: str, requests: list[tuple[Request, int | None]]) -> list[str]:
        ids: list[str] = []
        for request, step in requests:
            if not request.answered:
                continue
            fresh, *rest = self._commands.answer(request)
            if fresh == -1:
                return []
            if fresh == 1:
                self._on_fresh(queue)
            if step is None:
                ids.extend([""] * rest[0])
            else:
                ids.extend(f"{step}:{entry.decode()}" if entry else "" for entry in rest)
        return ids

    def flush(self) -> None:
        """Wait for every answer; raises the first error."""
        if not self._deferred:
            return
        with self._commands.lock:
            self._commands.settle(0)

    def own_keys(self) -> list[str]:
        """Keys of this process that nobody needs after a clean close."""
        needed = {producer.name for producer, _ in self._unresolved.values()}
        return [self._keys.producer(queue, name) for queue, name in self._used if name not in needed]

    def after_fork(self) -> None:
        _memories.clear()
        self._start()


def _digest(queue: str, everything: list[bytes]) -> bytes:
    digest = hashlib.blake2b(queue.encode("utf-8", "surrogateescape"), digest_size=16)
    for data in everything:
        digest.update(b"%d\n" % len(data))
        digest.update(data)
    return digest.digest()
