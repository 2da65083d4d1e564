"""Messages of Dramatiq and the bytes that the store keeps of them."""

from __future__ import annotations

import json
import math
import time
import traceback
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import dramatiq
from dramatiq.errors import DecodeError

from ..message import Message, printable

#: longest delay (ms)
LONGEST_DELAY = 10 * 365 * 86_400_000
#: beyond any number of retries and ms
_MANY = 2 ** 53
#: longest text of an exception in a reason
_REASON = 300
#: longest traceback that is kept (bytes), and where its middle was
_TRACEBACK, _CUT = 65_536, "\n[...]\n"


@lru_cache(maxsize=1024)
def head_of(actor: str) -> bytes:
    """For people and tools; the adapter never needs it."""
    return json.dumps({"type": actor}).encode()


def decode(body: bytes, queue: str) -> dramatiq.Message[Any]:
    """A message of `queue`, whatever queue it names: Dramatiq's worker finds the way back by that name.

    Raises DecodeError, also for a message whose parts a worker cannot handle.
    """
    message: dramatiq.Message[Any] = dramatiq.Message.decode(body)
    for name, kind in _SHAPE:
        if not isinstance(getattr(message, name), kind):
            raise DecodeError(f"{name} cannot be {getattr(message, name)!r:.80}", body, None)
    if message.options:
        _check_options(message.options, body)
    return message if message.queue_name == queue else message.copy(queue_name=queue)


#: dict before Mapping: most are one, and asking an abstract class takes long
_SHAPE: tuple[tuple[str, type | tuple[type, ...]], ...] = (
    ("actor_name", str), ("kwargs", (dict, Mapping)), ("options", dict), ("message_id", str),
    ("message_timestamp", (int, float)))


def _check_options(options: dict[str, Any], body: bytes) -> None:
    for name in ("min_backoff", "max_backoff"):
        if options.get(name, 0) is None:
            # not given
            del options[name]
    for name, fits in _OPTIONS.items():
        if name in options and not fits(options[name]):
            raise DecodeError(f"option {name} cannot be {options[name]!r:.80}", body, None)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and abs(value) < _MANY


def _is_time(value: Any) -> bool:
    return value is None or isinstance(value, (int, float)) and (abs(value) < _MANY or value == math.inf)


def _is_pause(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) < _MANY


def _is_error(value: Any) -> bool:
    kinds = value if isinstance(value, tuple) else (value,)
    return value is None or all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in kinds)


#: options that Dramatiq's middleware stumbles over when a job has failed: it would be acknowledged, neither tried again
#: nor kept
_OPTIONS: Mapping[str, Callable[[Any], bool]] = {
    "retries": _is_count, "max_retries": lambda value: value is None or _is_count(value), "min_backoff": _is_pause,
    "max_backoff": _is_pause, "time_limit": _is_time, "max_age": _is_time, "throws": _is_error}


def take_eta(message: dramatiq.Message[Any]) -> tuple[dramatiq.Message[Any], float]:
    """The message without its numeric `eta`, and the ms until then: the store does the waiting. Others stay: the worker
    tells of them."""
    eta = message.options.get("eta")
    if not isinstance(eta, (int, float)):
        return message, 0.0
    options = {name: value for name, value in message.options.items() if name != "eta"}
    try:
        left = eta - time.time() * 1000
    except OverflowError:
        left = math.inf if eta > 0 else -math.inf
    return without_options(message, options), left if left > 0 else 0.0


def without_options(message: dramatiq.Message[Any], options: dict[str, Any]) -> dramatiq.Message[Any]:
    """A copy with these options and no others; `copy` only adds."""
    return dramatiq.Message(**{**message.asdict(), "options": options})


def with_short_traceback(message: dramatiq.Message[Any]) -> dramatiq.Message[Any]:
    """Both ends of a long one: an exception may have a whole answer of a server in its text."""
    text = message.options.get("traceback")
    if not isinstance(text, str) or not text:
        return message
    # as it is stored: what is not ASCII takes six bytes and more
    size = len(text) if text.isascii() else len(json.dumps(text))
    if size <= _TRACEBACK:
        return message
    half = int(len(text) * _TRACEBACK / size) // 2
    return without_options(message, {**message.options, "traceback": text[:half] + _CUT + text[-half:]})


def without_traceback(message: dramatiq.Message[Any]) -> dramatiq.Message[Any]:
    return without_options(message, {name: value for name, value in message.options.items() if name != "traceback"})


def checked_delay(delay: float) -> float:
    """Seconds. Raises ValueError for what cannot be waited for."""
    if not math.isfinite(delay) or delay > LONGEST_DELAY:
        raise ValueError(f"a delay of {delay} ms is longer than {LONGEST_DELAY} ms (ten years)")
    return max(0.0, delay) / 1000


def reason_of(error: BaseException | None) -> str:
    if error is None:
        return "failed"
    text = printable(f"{type(error).__name__}: {error}").rstrip(": ")
    return text if len(text) <= _REASON else text[:_REASON] + "..."


def dead_copy(message: dramatiq.MessageProxy, original: Message) -> Message:
    """What is kept of a failed message: as it is now, with the last traceback. The message itself is left alone."""
    error = message._exception
    options = dict(message.options)
    if error is not None and "traceback" not in options:
        options["traceback"] = "".join(traceback.format_exception(type(error), error, error.__traceback__, limit=30))
    kept = with_short_traceback(without_options(message._message, options))
    return original._replace(body=kept.encode())


def revived(message: dramatiq.Message[Any]) -> dramatiq.Message[Any]:
    """A dead letter that was put back starts anew: all its retries are before it."""
    gone = ("traceback", "requeue_timestamp")
    options = {name: value for name, value in message.options.items() if name not in gone}
    return without_options(message, {**options, "retries": 0} if "retries" in options else options)
