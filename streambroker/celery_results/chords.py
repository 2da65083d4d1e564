"""Chords: the parts of a header are gathered in the result store, and the last of them publishes the body."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from celery import group, maybe_signature, states
from celery.app.task import Context
from celery.exceptions import ChordError
from celery.result import GroupResult, allow_join_result
from celery.utils.functional import _regen, maybe_list
from kombu.utils.encoding import ensure_bytes

from ..results.gathering import Gathering

if TYPE_CHECKING:
    from .backend import JetStreamBackend

logger = logging.getLogger(__name__)


class Chords:
    """Of one backend. Group ids name the chords."""

    def __init__(self, backend: JetStreamBackend) -> None:
        self._backend = backend

    def gathering(self, group_id: str) -> Gathering:
        return Gathering(self._backend.store, self._backend.get_key_for_group(group_id),
                         self._backend.parts_expire or 0)

    def save_nested(self, header_result_args: tuple[Any, ...]) -> None:
        """Groups inside the header: their shape is needed when its values are put together."""
        if isinstance(header_result_args[1], _regen):
            # a generator, whose tasks are single ones: Celery 5.3 only numbers them when it is run out, which
            # does not use it up
            list(header_result_args[1])
            return
        header = self._backend.app.GroupResult(*header_result_args)
        if any(isinstance(each, GroupResult) for each in header.results):
            self._backend.set(self._backend.get_key_for_group(header.id),
                              self._backend.encode({"result": header.as_tuple()}), self._backend.parts_expire)

    def part_done(self, request: Any, state: str, result: Any, told: Sequence[Any] = ()) -> None:
        """A task of a header has ended. The last one publishes the body, or fails it. `told` are callbacks for errors
        that know of this failure."""
        task_id, group_id, index = request.id, request.group, request.group_index
        if not task_id or not group_id:
            return
        backend = self._backend
        gathering = self.gathering(group_id)
        value = ensure_bytes(backend.encode([1, task_id, state, backend.encode_result(result, state), list(told)]))
        # one task can stand in a header twice
        part = f"{'last' if index is None else format(index, '08d')}-{task_id}"
        turn = backend.persist(partial(gathering.arrive, part, value))
        if turn is None:
            return
        body = maybe_signature(request.chord, app=backend.app)
        parts = [backend.decode(value) for value in backend.persist(gathering.values)]
        try:
            values = self._values(group_id, parts)
        except Exception as error:  # whatever the parts raised, or the reading of what they returned
            logger.exception("chord %r has no values for its body", group_id)
            self._fail(body, error if isinstance(error, ChordError) else ChordError(f"Join error: {error!r}"), parts)
            backend.persist(partial(gathering.finish, turn))
            return
        turn = backend.persist(partial(gathering.renew, turn))
        if turn is None:
            logger.warning("chord %r: its body is published by another worker", group_id)
            return
        try:
            self._publish(body, values)
        except Exception as error:  # whatever a broker raises
            logger.exception("chord %r: its body cannot be published", group_id)
            self._fail(body, ChordError(f"Callback error: {error!r}"), ())
        backend.persist(partial(gathering.finish, turn))

    def _fail(self, body: Any, error: ChordError, parts: Iterable[Sequence[Any]]) -> None:
        """Call the callbacks for errors that were not told by a chord inside, and fail the body's result."""
        told = [callback for part in parts for callback in part[4]]
        mine = maybe_list(body.options.get("link_error")) or []
        left = [callback for callback in mine if callback not in told]
        self._backend.chord_error_from_stack(body.clone(link_error=left) if told else body, error)
        # a body can be a part of another chord, which would wait for ever
        for each in body.tasks if isinstance(body, group) else [body]:
            options = each.options
            if options.get("chord"):
                request = Context(id=options.get("task_id"), group=options.get("group_id"),
                                  group_index=options.get("group_index"), chord=options["chord"])
                self.part_done(request, states.FAILURE, error, [*told, *mine])

    def _publish(self, body: Any, values: list[Any]) -> None:
        amqp = self._backend.app.amqp
        if hasattr(amqp, "_retry_publish"):  # Celery 5.7 up: tries again as `retry_policy` says
            amqp._retry_publish(body.delay, values)
        else:
            body.delay(values)

    def _values(self, group_id: str, parts: Iterable[Sequence[Any]]) -> list[Any]:
        """What the body gets. Raises ChordError when a part failed."""
        backend = self._backend
        header = GroupResult.restore(group_id, backend=backend, app=backend.app)
        if header is None:
            return [self._value(part) for part in parts]
        header.on_ready()
        with allow_join_result():
            joined: list[Any] = header.join_native(timeout=backend.app.conf.result_chord_join_timeout, propagate=True)
        return joined

    def _value(self, part: Sequence[Any]) -> Any:
        _, task_id, state, value, _ = part
        if state in states.EXCEPTION_STATES:
            value = self._backend.exception_to_python(value)
        if state in states.PROPAGATE_STATES:
            error = ChordError(f"Dependency {task_id} raised {value!r}")
            if isinstance(value, BaseException):
                error.__cause__ = value
            raise error
        return value
