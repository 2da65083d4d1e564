"""Every option once: name, unit, default, bounds, meaning. README's table is checked against this one."""

from __future__ import annotations

import dataclasses
import difflib
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from .errors import ConfigurationError

logger = logging.getLogger(__name__)


def _option(default: Any, meaning: str, *, unit: str = "", low: float | None = None, high: float | None = None,
            choices: tuple[str, ...] = (), aliases: tuple[str, ...] = ()) -> Any:
    return dataclasses.field(default=default, metadata={
        "meaning": meaning, "unit": unit, "low": low, "high": high, "choices": choices, "aliases": aliases})


@dataclass(frozen=True)
class Settings:
    """Options of an engine. Times are seconds."""

    prefix: str = _option("sb", "Start of every key, channel and subject; two prefixes never meet.",
                          aliases=("global_keyprefix",))
    visibility_timeout: float = _option(
        30.0, "Lease: how long a silent worker keeps its messages before others may take them. It is renewed while the "
        "worker lives, so it need not fit the longest task.", unit="s", low=1, high=86400)
    delivery_limit: int | None = _option(
        5, "Deliveries of one message, kills and lost leases included, before it becomes a dead letter. None or 0: no "
        "limit.", low=0, high=1_000_000)
    proof_of_death: bool = _option(
        True, "Take a dead worker's messages as soon as its death is proved instead of after the lease.")
    dead_letter_max_age: float = _option(604800.0, "Dead letters older than this are removed.", unit="s", low=1)
    dead_letter_max_count: int = _option(100_000, "Dead letters kept for each queue; the oldest go first.", low=1)
    max_message_size: int = _option(64 * 1024 * 1024, "Larger messages are refused before anything is sent.",
                                    unit="bytes", low=1)
    priority_steps: tuple[int, ...] = _option(
        (0, 3, 6, 9), "Priorities are served in these steps; each is a stream of its own.")
    priority_order: str = _option("redis", "Which end goes first: `redis` 0, `amqp` the highest number.",
                                  choices=("redis", "amqp"))
    queue_order_strategy: str = _option(
        "round_robin", "Order of the queues of one consumer: `round_robin` takes turns, `sorted` by name, `priority` "
        "as listed.", choices=("round_robin", "sorted", "priority"))
    confirm: str = _option(
        "each", "`each`: publish returns when the store has the message. `deferred`: when the one before it is stored; "
        "faster, an error shows one publish later.", choices=("each", "deferred"))
    publish_timeout: float = _option(
        10.0, "How long one publish tries to get over a broken link before it raises.", unit="s", low=0, high=3600)
    reconnect_timeout: float = _option(
        5.0, "How long a consumer mends a broken link by itself before it tells the framework.", unit="s", low=0,
        high=3600)
    block_timeout: float = _option(10.0, "Longest wait of an idle consumer in one request.", unit="s", low=0.1, high=30)
    socket_timeout: float = _option(10.0, "Longest wait for an answer of the store.", unit="s", low=0.1, high=600)
    socket_connect_timeout: float = _option(5.0, "Longest wait for a connection.", unit="s", low=0.1, high=600)
    socket_keepalive: bool = _option(True, "TCP keep-alive on the store's connections.")
    client_name: str = _option("", "Name of the connections as `CLIENT LIST` shows it; empty: `streambroker`.")


@dataclass(frozen=True)
class JetStreamSettings(Settings):
    """Options of the JetStream engine: those of all engines, and its own."""

    replicas: int = _option(1, "JetStream: copies of each stream in a cluster.", low=1, high=5)
    storage: str = _option("file", "JetStream: where streams are kept.", choices=("file", "memory"))
    duplicate_window: float = _option(
        120.0, "JetStream: how long the server recognizes a repeated publish.", unit="s", low=1, high=86400)
    stream_per_queue: bool = _option(
        False, "JetStream: a stream for each queue instead of one for all; more cost, own limits.")
    domain: str = _option("", "JetStream: domain of the server's API.")
    api_prefix: str = _option(
        "", "JetStream: prefix of the server's API where an account imports it; empty: `$JS.API`.")


@dataclass(frozen=True)
class SentinelSettings(Settings):
    """Options of the Redis Streams engine behind Sentinel: those of all engines, and its own."""

    master_name: str = _option("", "Sentinel: name of the primary, as in the sentinels' `sentinel monitor` line.")
    min_other_sentinels: int = _option(
        0, "Sentinel: one that sees fewer other sentinels than this is not believed.", low=0)


#: options of kombu's Redis transport that have no meaning here, and why
IGNORED: Mapping[str, str] = {
    "unacked_key": "unsettled messages are kept by the stream's consumer group",
    "unacked_index_key": "unsettled messages are kept by the stream's consumer group",
    "unacked_mutex_key": "recovery needs no lock",
    "unacked_mutex_expire": "recovery needs no lock",
    "unacked_restore_limit": "recovery follows the lease",
    "unacked_restore_interval": "recovery follows the lease",
    "unacked_restore_throttle": "recovery follows the lease",
    "ack_emulation": "acknowledgements are the store's own",
    "sep": "each priority step has a stream of its own",
    "fanout_prefix": "broadcasts are always kept apart by prefix and database",
    "fanout_patterns": "binding keys with wildcards always filter",
    "body_encoding": "bodies are stored as they are",
    "polling_interval": "nothing polls",
    "health_check_interval": "links are watched by the keeper",
    "retry_on_timeout": "links are mended by the engine",
    "max_connections": "a process uses at most six connections, in a cluster some for each node",
    "sentinel_fanout_compat": "broadcasts are always kept apart by prefix and database",
}


#: for those who come from a transport where it has to be longer than the longest task
_NO_LONG_LEASE = ("here it is a lease, which is renewed while the worker lives: the large values of Celery's Redis "
                  "transport are not needed; leave it out")


def _names(kind: type[Settings]) -> dict[str, str]:
    names: dict[str, str] = {}
    for field in dataclasses.fields(kind):
        names[field.name] = field.name
        for alias in field.metadata["aliases"]:
            names[alias] = field.name
    return names


def _checked(field: dataclasses.Field[Any], value: Any) -> Any:
    low, high, choices, unit = (field.metadata[k] for k in ("low", "high", "choices", "unit"))
    kind: type = type(field.default)
    if value is None:
        if field.name == "delivery_limit":
            return None
        return field.default
    try:
        if kind is tuple:
            steps = tuple(sorted({int(step) for step in value}))
            if not steps:
                raise ValueError("empty")
            return steps
        if kind is bool:
            if not isinstance(value, (bool, int)):
                raise ValueError("not true or false")
            return bool(value)
        if kind is str:
            if not isinstance(value, str):
                raise ValueError("not a text")
        else:
            if isinstance(value, bool):
                raise ValueError("not a number")
            value = kind(value)
            if not math.isfinite(value):
                raise ValueError("not a finite number")
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigurationError(f"option {field.name}: {value!r} cannot be used ({error})") from error
    if choices and value not in choices:
        raise ConfigurationError(f"option {field.name}: {value!r} is none of {', '.join(choices)}")
    if low is not None and value < low or high is not None and value > high:
        bounds = f"at least {low}" if high is None else f"{low} to {high}"
        why = f"; {_NO_LONG_LEASE}" if field.name == "visibility_timeout" and value > 1 else ""
        raise ConfigurationError(
            f"option {field.name}: {value!r} is out of bounds ({f'{bounds} {unit}'.rstrip()}){why}")
    return value


Kind = TypeVar("Kind", bound=Settings)


@overload
def read_settings(options: Mapping[str, Any], *, foreign: frozenset[str] = ...) -> Settings: ...


@overload
def read_settings(options: Mapping[str, Any], kind: type[Kind], *, foreign: frozenset[str] = ...) -> Kind: ...


def read_settings(options: Mapping[str, Any], kind: type[Any] = Settings, *,
                  foreign: frozenset[str] = frozenset()) -> Any:
    """Settings of that kind from plain options.

    Unknown names raise ConfigurationError with the nearest known name, unless they are in `foreign` (a framework's or
    a client's own names, which pass through here). Raises ConfigurationError for a value out of bounds.
    """
    names = _names(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    found: dict[str, Any] = {}
    for name, value in options.items():
        if name in names:
            found[names[name]] = _checked(fields[names[name]], value)
        elif name in IGNORED:
            logger.info("option %s has no effect: %s", name, IGNORED[name])
        elif name not in foreign:
            near = difflib.get_close_matches(name, [*names, *IGNORED], n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigurationError(f"unknown option {name!r}{hint}")
    return kind(**found)
