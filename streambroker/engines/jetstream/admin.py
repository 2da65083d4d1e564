"""Removing queues and what is in them, for the engine. Blocks; not for the link's thread."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .api import ApiError

if TYPE_CHECKING:
    from .engine import JetStreamEngine


def delete_queue(engine: JetStreamEngine, queue: str, *, if_empty: bool) -> int:
    """The queue with all that is in it, its dead letters excepted; how many messages waited, -1 when it was not empty
    and had to be."""
    spec = engine.queues.spec(queue)
    stats = engine.inspector().stats(queue)
    waiting = stats.ready + stats.delayed
    if if_empty and waiting:
        return -1
    names = engine.names
    _drop(engine, f"STREAM.PURGE.{names.late}", {"filter": f"{names.lately(queue, '*')}.>"})
    if spec is not None and not spec.durable:
        _drop(engine, f"CONSUMER.DELETE.{names.transient}.{names.transient_durable(queue)}")
    elif engine.settings.stream_per_queue:
        _drop(engine, f"STREAM.DELETE.{names.stream(queue)}")
        engine.streams.deleted(names.stream(queue))
    else:
        for subject in (names.ready(queue, "*"), names.scheduled(queue, "*", ">")):
            _drop(engine, f"STREAM.PURGE.{names.main}", {"filter": subject})
        for step in engine.queues.steps(queue):
            _drop(engine, f"CONSUMER.DELETE.{names.main}.{names.durable(queue, step)}")
    engine.queues.remove(queue)
    engine.janitor.forget(queue)
    return waiting


def _drop(engine: JetStreamEngine, request: str, body: dict[str, Any] | None = None) -> None:
    try:
        engine.api.call(request, body)
    except ApiError as error:
        if not error.missing:
            raise


def is_there(engine: JetStreamEngine, queue: str) -> bool:
    """Whether a queue that nobody declared was ever consumed or holds something."""
    names = engine.names
    try:
        engine.api.call(f"CONSUMER.INFO.{names.stream(queue)}.{names.durable(queue, 0)}")
    except ApiError as error:
        if not error.missing:
            raise
    else:
        return True
    try:
        info = engine.api.call(f"STREAM.INFO.{names.stream(queue)}", {"subjects_filter": names.ready(queue, "*")})
    except ApiError as error:
        if not error.missing:
            raise
        return False
    return bool(info["state"].get("subjects"))
