"""What no program should send: inputs made from a seed, each with what it may end as.

`celery_inputs(seed, count)` and `dramatiq_inputs(seed, count)` are messages as they would lie in the store, whole or
broken; `names(seed, count)` are queue names. The same seed makes the same inputs.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from streambroker.engines.jetstream.envelope import Envelope
from streambroker.engines.redis_streams import publisher
from streambroker.message import Message
from streambroker.testing.natsserver import NatsServer
from streambroker.testing.servers import RedisServer

#: what an input may end as
DEAD, RUN, GONE = "dead letter", "run, now or in its time", "gone, as it asks for"
_ANY = frozenset({DEAD, RUN})


@dataclass(frozen=True)
class Input:
    """`what` tells what is wrong with it. Its entry is `message`, or `raw`, bytes in its place."""

    name: str
    what: str
    message: Message | None = None
    raw: bytes = b""
    ends: frozenset[str] = _ANY


class Odd(random.Random):
    """Values that nobody expects."""

    def noise(self, most: int = 64) -> bytes:
        return self.randbytes(self.randrange(most))

    def text(self, most: int = 12) -> str:
        """Of all planes, controls and lone surrogates too."""
        return "".join(chr(self.choice((self.randrange(128), self.randrange(0x3000), self.randrange(0xD800, 0xE000),
                                        self.randrange(0x110000)))) for _ in range(self.randrange(most)))

    def deep(self) -> str:
        """JSON within JSON, closed or not."""
        depth = self.choice((40, 900, 2_000, 100_000))
        left, right = self.choice((("[", "]"), ('{"a":', "}")))
        return left * depth + "1" * self.randrange(2) + right * self.choice((depth, depth - 1, 0))

    def value(self) -> Any:
        """Of any type that JSON knows, and some that it should not."""
        return self.choice((
            lambda: None, lambda: True, lambda: 0, lambda: -1, lambda: 10 ** 400, lambda: self.uniform(-1e308, 1e308),
            lambda: float("nan"), lambda: float("inf"), lambda: -float("inf"), lambda: "", lambda: self.text(),
            lambda: "x" * self.choice((300, 70_000)), list, lambda: [[], {}], lambda: [None, self.text()],
            dict, lambda: {"": None}, lambda: {self.text(): self.text()}, lambda: {"__type__": self.text()},
            lambda: {"__type__": "datetime", "__value__": self.text()}, lambda: 2 ** 63, lambda: "2" * 30,
        ))()

    def time(self) -> Any:
        """No time at all, or one that is over."""
        return self.choice((
            lambda: "soon", lambda: "", lambda: "2020-13-45T99:99:99", lambda: "2020-01-01T00:00:00",
            lambda: "1970-01-01T00:00:00+99:99", lambda: "0001-01-01T00:00:00+14:00", lambda: "-1", lambda: 5,
            lambda: -5.5, lambda: "1999-12-31T23:59:59Z", lambda: "\u0662\u0660\u0662\u0660-01-01", list,
            lambda: {"a": 1},
            lambda: float("nan"), lambda: -1e300, lambda: self.text()))()


def _frame(odd: Odd, message: Message, nats: bool) -> bytes:
    """The entry of a message, cut, stretched or scratched."""
    data = Envelope(message).encode() if nats else publisher.encode(message)
    for _ in range(odd.randrange(1, 4)):
        at = odd.randrange(len(data) + 1)
        data = odd.choice((data[:at], data[:at] + odd.noise() + data[at:], odd.noise() + data[min(40, at):],
                           b"9" * 30 + data[4:]))
    return data or odd.noise() or b"\0"


def _dump(value: Any) -> bytes:
    return json.dumps(value).encode()


# ---------------------------------------------------------------- Celery

_HEADERS = ("lang", "task", "id", "shadow", "eta", "expires", "group", "group_index", "retries", "timelimit", "root_id",
            "parent_id", "argsrepr", "kwargsrepr", "origin", "ignore_result", "replaced_task_nesting",
            "stamped_headers", "stamps", "compression", "x-delivery-count", "redelivered", "delivery_info", "chord",
            "errbacks", "callbacks", "x-death", "headers", "hostname", "trailer", "args", "kwargs", "utc", "reply_to",
            "correlation_id", "called_directly", "is_eager", "request_stack")
_PROPERTIES = ("correlation_id", "reply_to", "delivery_mode", "delivery_info", "priority", "body_encoding",
               "delivery_tag", "expiration", "content_type", "headers")


def _task(name: str) -> tuple[dict[str, Any], list[Any]]:
    """Head and body of a good one."""
    head = {"type": "work", "content_type": "application/json", "content_encoding": "utf-8",
            "headers": {"lang": "py", "task": "work", "id": name, "shadow": None, "eta": None, "expires": None,
                        "group": None, "group_index": None, "retries": 0, "timelimit": [None, None], "root_id": name,
                        "parent_id": None, "argsrepr": "()", "kwargsrepr": "{}", "origin": "fuzz",
                        "ignore_result": True, "stamped_headers": None, "stamps": {}},
            "properties": {"correlation_id": name, "reply_to": "", "delivery_mode": 2, "priority": 0}}
    return head, [[name], {}, {"callbacks": None, "errbacks": None, "chain": None, "chord": None}]


def celery_inputs(seed: int, count: int, nats: bool) -> Iterator[Input]:
    odd = Odd(seed)
    for number in range(count):
        name = f"bad-{seed}-{number}"
        head, body = _task(name)
        kind = odd.choice(_CELERY)
        yield kind(odd, name, head, body, nats)


Maker = Callable[[Odd, str, dict[str, Any], Any, bool], Input]


def _whole(name: str, what: str, head: Any, body: Any, ends: frozenset[str] = _ANY) -> Input:
    return Input(name, what, Message(body if isinstance(body, bytes) else _dump(body),
                                     head if isinstance(head, bytes) else _dump(head), name), ends=ends)


def _bad_body(odd: Odd, name: str, head: dict[str, Any], body: Any, nats: bool) -> Input:
    if odd.random() < 0.1:
        # with a list it runs, under another name
        return _whole(name, "arguments", head, [odd.value(), {}, {}], _ANY | {GONE})
    data = odd.choice((
        lambda: odd.noise(), lambda: _dump(body)[:odd.randrange(20)], lambda: odd.deep().encode(),
        lambda: _dump(odd.value()), lambda: _dump([[name], odd.value(), odd.value()]),
        lambda: _dump([odd.value() for _ in range(odd.choice((1, 2, 4, 5)))]),
        lambda: b"\x80\x05." + odd.noise(), lambda: _dump([[name], {}, {"callbacks": odd.value(), "chain": odd.value(),
                                                                      "errbacks": odd.value(), "chord": odd.value()}]),
    ))()
    return _whole(name, "body", head, data)


def _bad_header(odd: Odd, name: str, head: dict[str, Any], body: Any, nats: bool) -> Input:
    key = odd.choice(_HEADERS)
    head["headers"][key] = odd.value()
    # what has expired is discarded, as Celery has it
    return _whole(name, f"header {key}={head['headers'][key]!r:.60}", head, body,
                  _ANY | {GONE} if key == "expires" else _ANY)


def _bad_time(odd: Odd, name: str, head: dict[str, Any], body: Any, nats: bool) -> Input:
    key = odd.choice(("eta", "expires"))
    head["headers"][key] = odd.time()
    # what has expired is discarded, as Celery has it
    return _whole(name, f"header {key}={head['headers'][key]!r:.60}", head, body,
                  _ANY | {GONE} if key == "expires" else _ANY)


def _missing(odd: Odd, name: str, head: dict[str, Any], body: Any, nats: bool) -> Input:
    part = odd.choice((head, head["headers"], head["properties"]))
    for key in odd.sample(list(part), odd.randrange(1, len(part))):
        del part[key]
    return _whole(name, "missing parts", head, body)


def _bad_property(odd: Odd, name: str, head: dict[str, Any], body: Any, nats: bool) -> Input:
    key = odd.choice(_PROPERTIES)
    head["properties"][key] = odd.value()
    return _whole(name, f"property {key}={head['properties'][key]!r:.60}", head, body)


def _bad_part(odd: Odd, name: str, head: dict[str, Any], body: Any, nats: bool) -> Input:
    key = odd.choice((*head, "exchange", "routing_key", "waits"))
    head[key] = odd.value()
    return _whole(name, f"{key}={head[key]!r:.60}", head, body)


def _bad_content(odd: Odd, name: str, head: dict[str, Any], body: Any, nats: bool) -> Input:
    head["content_type"] = odd.choice(("application/json", "application/x-python-serialize", "application/x-yaml",
                                       "application/data", "text/plain", "application/x-msgpack", "nope", "\0"))
    head["content_encoding"] = odd.choice(("utf-8", "binary", "utf-16", "nope", "base64", "\0", "us-ascii"))
    if odd.random() < 0.5:
        head["headers"]["compression"] = odd.choice(("application/x-gzip", "gzip", "application/x-bz2", "nope", "zstd"))
    return _whole(name, f"content {head['content_type']!r} {head['content_encoding']!r}", head, body)


def _bad_head(odd: Odd, name: str, head: dict[str, Any], body: Any, nats: bool) -> Input:
    data = odd.choice((
        lambda: odd.noise(), lambda: _dump(head)[:odd.randrange(300)], lambda: odd.deep().encode(),
        lambda: _dump(odd.value()), lambda: _dump(head).replace(b'"work"', odd.noise(8)),
        lambda: _dump({**head, "headers": {**head["headers"], "huge": "x" * 500_000}}),
        lambda: _dump(head).replace(b"null", odd.deep().encode(), 1)))()
    return _whole(name, "head", data, body, _ANY | {GONE})


def _bad_frame(odd: Odd, name: str, head: dict[str, Any], body: Any, nats: bool) -> Input:
    good = Message(_dump(body), _dump(head), name)
    return Input(name, "entry", raw=_frame(odd, good, nats), ends=_ANY | {GONE})


def _foreign(odd: Odd, name: str, head: dict[str, Any], body: Any, nats: bool) -> Input:
    return Input(name, "foreign", raw=odd.noise(2_000) or b"\0", ends=frozenset({DEAD}))


_CELERY: tuple[Maker, ...] = (_bad_body, _bad_header, _bad_header, _bad_time, _missing, _bad_property, _bad_part,
                              _bad_content, _bad_head, _bad_frame, _foreign)


# ---------------------------------------------------------------- Dramatiq

_OPTIONS = ("retries", "max_retries", "min_backoff", "max_backoff", "time_limit", "max_age", "pipe_target", "eta",
            "traceback", "requeue_timestamp", "redis_message_id", "broker_priority", "group_completion_uuid",
            "group_completion_callbacks", "on_success", "on_failure", "throws", "store_results", "result_ttl",
            "notify_shutdown", "retry_when", "pipe_ignore")


def dramatiq_inputs(seed: int, count: int, nats: bool) -> Iterator[Input]:
    odd = Odd(seed)
    for number in range(count):
        name = f"bad-{seed}-{number}"
        body: dict[str, Any] = {"queue_name": "default", "actor_name": "work", "args": [name], "kwargs": {},
                                "options": {"max_retries": 1, "min_backoff": 1, "max_backoff": 1}, "message_id": name,
                                "message_timestamp": 1_600_000_000_000}
        yield odd.choice(_DRAMATIQ)(odd, name, {"type": "work"}, body, nats)


def _dramatiq_value(odd: Odd, name: str, head: dict[str, Any], body: Any, nats: bool) -> Input:
    key = odd.choice(tuple(body))
    body[key] = odd.value()
    # with arguments of another kind it runs under another name
    return _whole(name, f"{key}={body[key]!r:.60}", head, body, _ANY | {GONE} if key == "args" else _ANY)


def _dramatiq_option(odd: Odd, name: str, head: dict[str, Any], body: Any, nats: bool) -> Input:
    key = odd.choice(_OPTIONS)
    value = odd.choice((odd.value, odd.time))()
    body["options"][key] = value
    if odd.random() < 0.3 and (key, value) != ("max_retries", None):
        # and it fails; without an end to its retries it would do so for ever
        body["args"] = []
    return _whole(name, f"option {key}={value!r:.60}", head, body)


def _dramatiq_missing(odd: Odd, name: str, head: dict[str, Any], body: Any, nats: bool) -> Input:
    for key in odd.sample(list(body), odd.randrange(1, len(body))):
        del body[key]
    return _whole(name, "missing parts", head, body)


def _dramatiq_body(odd: Odd, name: str, head: dict[str, Any], body: Any, nats: bool) -> Input:
    data = odd.choice((
        lambda: odd.noise(), lambda: _dump(body)[:odd.randrange(200)], lambda: odd.deep().encode(),
        lambda: _dump(odd.value()), lambda: b"\x80\x05." + odd.noise(),
        lambda: _dump({**body, "huge": "x" * 500_000}), lambda: _dump({**body, odd.text(): odd.value()}),
        lambda: _dump(body).replace(b"{}", odd.deep().encode(), 1),
        lambda: _dump({**body, "options": {**body["options"], odd.text(): odd.value()}})))()
    return _whole(name, "body", head, data)


def _dramatiq_head(odd: Odd, name: str, head: dict[str, Any], body: Any, nats: bool) -> Input:
    return _whole(name, "head", odd.noise(), body)


_DRAMATIQ: tuple[Maker, ...] = (_dramatiq_value, _dramatiq_option, _dramatiq_option, _dramatiq_missing, _dramatiq_body,
                                _dramatiq_head, _bad_frame, _foreign)


# ---------------------------------------------------------------- through the publishers

def celery_calls(seed: int, count: int) -> Iterator[tuple[str, str, list[Any], dict[str, Any]]]:
    """(name, what is odd, arguments, options of `apply_async`)."""
    odd = Odd(seed)
    for number in range(count):
        name = f"call-{seed}-{number}"
        key = odd.choice(("priority", "expires", "eta", "countdown", "headers", "task_id", "time_limit",
                          "soft_time_limit", "link", "link_error", "shadow", "serializer", "compression", "reply_to",
                          "group_id", "expiration", "delivery_mode", "args", "correlation_id", "stamped_headers"))
        value = odd.choice((odd.value, odd.time, object, lambda: {1, 2}, lambda: odd.noise()))()
        if key == "args":
            yield name, f"{key}={value!r:.60}", [name, 0, value], {}
        else:
            yield name, f"{key}={value!r:.60}", [name], {key: value}


def dramatiq_calls(seed: int, count: int) -> Iterator[tuple[str, str, dict[str, Any], Any]]:
    """(name, what is odd, fields of a message, delay in ms)."""
    odd = Odd(seed)
    for number in range(count):
        name = f"call-{seed}-{number}"
        fields: dict[str, Any] = {"queue_name": "default", "actor_name": "work", "args": (name,), "kwargs": {},
                                  "options": {"max_retries": 0}}
        key = odd.choice(("actor_name", "args", "kwargs", "options", "message_id", "message_timestamp", "delay",
                          "an option"))
        value = odd.choice((odd.value, odd.time, object, lambda: {1, 2}, lambda: odd.noise()))()
        if key == "an option":
            fields["options"][odd.choice(_OPTIONS)] = value
        elif key != "delay":
            # as arguments they would be numbers, the second of them a time to sleep
            fields[key] = (value,) if key == "args" and isinstance(value, (bytes, set)) else value
        yield name, f"{key}={value!r:.60}", fields, value if key == "delay" else None


# ---------------------------------------------------------------- queue names, and the store

def names(seed: int, count: int) -> list[str]:
    """Names of queues, each once; all but empty."""
    odd = Odd(seed)
    found: dict[str, None] = {}
    while len(found) < count:
        name = odd.choice((
            lambda: odd.text(20), lambda: odd.text(300), lambda: "\u00e9" * odd.randrange(400),
            lambda: odd.choice("*>#.{}[]@%~:/\\'\"\0\n\r\t $") * odd.randrange(9),
            lambda: f"{odd.text(4)}.{odd.text(4)}", lambda: f"q{odd.choice('{}.*> :')}{odd.randrange(99)}"))()
        if name:
            found[name] = None
    return list(found)


def put(server: RedisServer | NatsServer, prefix: str, queue: str, inputs: list[Input]) -> None:
    """Lay them in the store as they are, without any publisher of ours."""
    if isinstance(server, NatsServer):
        from streambroker.engines.jetstream.names import Names

        for each in inputs:
            data = each.raw or Envelope(each.message or Message(b"")).encode()
            assert b'"seq"' in server.call(Names(prefix).ready(queue, 0), data), each
    else:
        with server.client() as client, client.pipeline(transaction=False) as pipe:
            for each in inputs:
                field = "data" if each.what == "foreign" else "m"
                pipe.xadd(f"{prefix}:{{{queue}}}:s:0",
                          {field: each.raw or publisher.encode(each.message or Message(b""))})
            pipe.rpush(f"{prefix}:{{{queue}}}:bell", "1")
            pipe.execute()
