"""The result backend `jetstream://`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from celery import states
from celery.backends.asynchronous import AsyncBackendMixin
from celery.backends.base import BaseKeyValueStoreBackend
from celery.exceptions import BackendStoreError, ImproperlyConfigured
from kombu.exceptions import KombuError
from kombu.utils.encoding import bytes_to_str, ensure_bytes
from kombu.utils.functional import retry_over_time

from ..errors import ConfigurationError, MessageTooLarge, StoreConnectionError
from ..kombu.conninfo import NATS_CLIENT, split_options
from ..settings import JetStreamSettings
from .chords import Chords
from .consumer import ResultConsumer

if TYPE_CHECKING:
    from celery import Celery

logger = logging.getLogger(__name__)

T = TypeVar("T")

_NO_CLIENT = "result_backend jetstream:// needs the nats-py package: pip install 'streambroker[jetstream]'"


class JetStreamBackend(BaseKeyValueStoreBackend, AsyncBackendMixin):
    """Celery's results in a JetStream stream, the last state of each task on a subject of its own.

    A success is never overwritten. A result is in the store when `store_result` returns, so before a late ack; while
    the store is away it tries again by `retry_policy`. One backend and one connection serve all threads and greenlets
    of a process. Options, in `result_backend_transport_options`, are those of the broker.
    """

    supports_autoexpire = True
    supports_native_join = True
    supports_result_compression = True
    supports_failure_expires = True
    key_t = bytes_to_str

    def __init__(self, app: Celery, url: str | None = None, expires: Any = None, **kwargs: Any) -> None:
        super().__init__(app, url=url, expires=expires, expires_type=float, **kwargs)
        self.thread_safe = True
        failures = app.conf.get("result_failure_expires")
        self.failure_expires = self.expires if failures is None else self.prepare_expires(failures, float)
        chords = app.conf.get("result_chord_expires")
        self.parts_expire = self.expires if chords is None else self.prepare_expires(chords, float)
        self._given: dict[str, Any] = app.conf.get("result_backend_transport_options") or {}
        self.store = self._open()
        self._chords = Chords(self)
        self.result_consumer = ResultConsumer(self, app, self.accept, self._pending_results, self._pending_messages)

    def _open(self) -> Any:
        if not self.url or "://" not in self.url:
            raise ImproperlyConfigured("result_backend looks like jetstream://host:4222")
        try:
            from ..results.store import shared
        except ImportError as error:
            raise ImproperlyConfigured(_NO_CLIENT) from error
        ages = [float(age or 0) for age in (self.expires, self.failure_expires, self.parts_expire)]
        try:
            options, _ = split_options(self._given, NATS_CLIENT, JetStreamSettings)
            return shared(self.url, options, expires=ages[0], max_age=0.0 if 0.0 in ages else max(ages))
        except ConfigurationError as error:
            raise ImproperlyConfigured(str(error)) from error

    def as_uri(self, include_password: bool = False) -> str:
        return str(self.url if include_password else self.store.address)

    def __reduce__(self, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        return super().__reduce__(args, {**(kwargs or {}), "expires": self.expires, "url": self.url})

    # Storing

    def _store_result(self, task_id: str, result: Any, state: str, traceback: Any = None, request: Any = None,
                      **kwargs: Any) -> Any:
        meta = self._get_result_meta(result=result, state=state, traceback=traceback, request=request)
        meta["task_id"] = bytes_to_str(task_id)
        body = ensure_bytes(self.encode(meta))
        expires = self.failure_expires if state == states.FAILURE else self.expires

        def change(present: bytes | None) -> bytes | None:
            return None if present is not None and self._is_success(present) else body

        try:
            self.persist(partial(self.store.update, self.get_key_for_task(task_id), change, expires=expires or 0))
        except MessageTooLarge as error:
            raise BackendStoreError(f"the result is too large: {error}", state=state, task_id=task_id) from error
        return result

    def _is_success(self, body: bytes) -> bool:
        try:
            return bool(self.decode(body)["status"] == states.SUCCESS)
        except (KombuError, ValueError, TypeError, KeyError) as error:
            logger.warning("a stored result that cannot be read is replaced: %s", error)
            return False

    @property
    def retry_policy(self) -> dict[str, Any]:
        """`retry_policy` of result_backend_transport_options over Celery's default."""
        return {**super().retry_policy, **self._given.get("retry_policy", {})}

    def persist(self, work: Callable[[], T]) -> T:
        """The result of `work`, tried again while the store is away, as `retry_policy` says."""
        policy = self.retry_policy
        most = policy.get("max_retries")

        def failed(error: Exception, intervals: Iterator[float], retries: int) -> float:
            pause = next(intervals)
            logger.error("the result store is away, try %s of %s in %.1f s: %s", retries, most or "any number", pause,
                         error)
            return pause

        found: T = retry_over_time(work, (StoreConnectionError,), errback=failed, **policy)
        return found

    def exception_safe_to_retry(self, exc: Exception) -> bool:
        return isinstance(exc, StoreConnectionError)

    def set(self, key: str, value: Any, expires: float | None = None) -> None:
        life = (self.expires if expires is None else expires) or 0
        self.persist(partial(self.store.put, key, ensure_bytes(value), expires=life))

    def delete(self, key: str) -> None:
        self.store.delete([key])

    # Reading and waiting

    def get(self, key: str) -> bytes | None:
        return self.mget([key])[0]

    def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        found = self.store.get_many(keys, patience=self.store.settings.reconnect_timeout)
        return [None if each is None else each.value for each in found]

    def add_pending_result(self, result: Any, weak: bool = False, start_drainer: bool = True) -> Any:
        # a get() holds its result itself; kept here, one that timed out or was never asked for would stay for ever
        return super().add_pending_result(result, weak=weak or not self.result_consumer.drains,
                                          start_drainer=start_drainer)

    def iter_native(self, result: Any, no_ack: bool = True, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        self._ensure_not_eager()
        groups = [node for node in result.results if not hasattr(node, "_cache")]
        waiting = []
        for node in result.results:
            if hasattr(node, "_cache"):
                if node._cache:
                    yield node.id, node._cache
                else:
                    waiting.append(node)
        left = {id(node): node for node in waiting}
        for ready in self._wait_for_pending(result, no_ack=no_ack, **kwargs):
            for node in ready:
                if left.pop(id(node), None) is not None:
                    yield node.id, node._cache
        for node in left.values():
            if node._cache:
                yield node.id, node._cache
        for node in groups:
            yield node.id, node.children

    # Chords

    def add_to_chord(self, chord_id: str, result: Any) -> None:
        self.persist(self._chords.gathering(chord_id).enlarge)

    def set_chord_size(self, group_id: str, chord_size: int) -> None:
        self.persist(partial(self._chords.gathering(group_id).begin, chord_size))

    def apply_chord(self, header_result_args: tuple[Any, ...], body: Any, **kwargs: Any) -> None:
        self.ensure_chords_allowed()
        self._chords.save_nested(header_result_args)

    def on_chord_part_return(self, request: Any, state: str, result: Any, **kwargs: Any) -> None:
        self._chords.part_done(request, state, result)
