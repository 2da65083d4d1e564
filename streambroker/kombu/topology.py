"""Exchanges, queues and bindings, as a channel declares, deletes and lists them."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from amqp.exceptions import NotFound
from amqp.protocol import queue_declare_ok_t
from kombu.transport import base
from kombu.utils.uuid import uuid

from ..errors import StoreConnectionError
from .queues import declare
from .routing import Binding, Exchange

if TYPE_CHECKING:
    from .shared import SharedEngine
    from .transport import Transport

logger = logging.getLogger(__name__)


class Topology(base.StdChannel):
    """A channel's verbs for what is declared.

    A queue of its connection alone can be live, stored, or both: the part that is bound to fanout and topic exchanges
    is live, the rest is stored.
    """

    shared: SharedEngine
    prepare_queue_arguments = staticmethod(base.to_rabbitmq_queue_arguments)

    @abstractmethod
    def transport(self) -> Transport:
        """Raises RecoverableConnectionError when the channel is closed."""

    # Exchanges and bindings

    def exchange_declare(self, exchange: str | None = None, type: str | None = "direct", durable: bool = False,
                         auto_delete: bool = False, arguments: Mapping[str, Any] | None = None, nowait: bool = False,
                         passive: bool = False, **kwargs: Any) -> None:
        name = exchange or f"amq.{type or 'direct'}"
        if passive:
            self.shared.router.check_exchange(name)
        else:
            self.shared.router.declare_exchange(name, Exchange(type or "direct", bool(durable), bool(auto_delete)))

    def exchange_delete(self, exchange: str, if_unused: bool = False, nowait: bool = False) -> None:
        self.shared.router.delete_exchange(exchange, if_unused)

    def exchange_bind(self, destination: str, source: str = "", routing_key: str = "", **kwargs: Any) -> None:
        raise NotImplementedError("exchanges cannot be bound to exchanges: bind the queue")

    exchange_unbind = exchange_bind

    def queue_bind(self, queue: str, exchange: str | None = None, routing_key: str = "",
                   arguments: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        transport, router = self.transport(), self.shared.router
        name, key = exchange or "amq.direct", routing_key or ""
        known = transport.declared.get(queue)
        if known is not None and known.can_be_live and router.exchange(name).live:
            transport.live.bind(known.spec, known.auto_delete, router.exchange(name), Binding(name, queue, key))
            if not router.is_bound_here(queue):
                self.shared.engine.delete(queue, if_unused=True, if_empty=True)
            return
        if known is not None and transport.live.get(queue) is not None:
            self.shared.engine.declare(known.spec)
        spec = known.spec if known is not None else self.shared.engine.spec(queue)
        router.bind(Binding(name, queue, key, spec is not None and not spec.durable))

    def queue_unbind(self, queue: str, exchange: str | None = None, routing_key: str = "",
                     arguments: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        live, name = self.transport().live, exchange or "amq.direct"
        if not live.unbind(Binding(name, queue, routing_key or "")):
            self.shared.router.unbind(name, queue, routing_key or "")

    def list_bindings(self) -> Iterator[tuple[str, str, str]]:
        return ((binding.queue, binding.exchange, binding.key) for binding in self.shared.router.bindings())

    # Queues

    def queue_declare(self, queue: str | None = None, passive: bool = False, durable: bool = False,
                      exclusive: bool = False, auto_delete: bool = False,
                      arguments: Mapping[str, Any] | None = None, nowait: bool = False,
                      **kwargs: Any) -> queue_declare_ok_t:
        transport, engine = self.transport(), self.shared.engine
        name = queue or f"amq.gen-{uuid()}"
        live = transport.live.get(name)
        if live is not None and not self.shared.router.is_bound_here(name):
            return queue_declare_ok_t(name, len(live), 0)
        if passive:
            if engine.spec(name) is None:
                raise NotFound(f"no queue {name!r}", (50, 10), "Channel.queue_declare")
            return queue_declare_ok_t(name, engine.ready(name), engine.consumers(name))
        new = declare(name, durable, exclusive, auto_delete, arguments, self.shared.adapter.auto_delete_expires)
        engine.declare(new.spec)
        transport.remember_queue(new)
        if new.can_be_live:
            # of this connection alone; Kombu's mailboxes warn of a twin when they hear of consumers
            return queue_declare_ok_t(name, 0, 0)
        return queue_declare_ok_t(name, engine.ready(name), engine.consumers(name))

    def queue_delete(self, queue: str, if_unused: bool = False, if_empty: bool = False, **kwargs: Any) -> int:
        """How many messages went with it; 0 as well when a condition did not hold and it stays."""
        transport, count = self.transport(), 0
        live = transport.live.get(queue)
        if live is not None:
            if if_unused and live.listeners or if_empty and len(live):
                return 0
            count = transport.live.delete(live)
            if not self.shared.router.is_bound_here(queue):
                return count
        transport.getter.leave(queue)
        deleted = self.shared.engine.delete(queue, if_unused=if_unused, if_empty=if_empty)
        if deleted < 0:
            return count
        known = transport.forget_queue(queue)
        self.shared.forget(queue, transient=known is not None and not known.spec.durable)
        return count + deleted

    def queue_purge(self, queue: str, **kwargs: Any) -> int:
        live = self.transport().live.get(queue)
        count = 0 if live is None else live.purge()
        if live is None or self.shared.router.is_bound_here(queue):
            count += self.shared.engine.inspector().purge(queue)
        return count

    def after_reply_message_received(self, queue: str) -> None:
        """Kombu's mailboxes call this when they have their replies."""
        try:
            self.queue_delete(queue)
        except StoreConnectionError as error:
            logger.debug("reply queue %r is left to expire: %s", queue, error)
