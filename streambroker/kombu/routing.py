"""Exchanges and bindings: kept on the store, seen by every process, copied in each.

The anonymous exchange never comes here. A named exchange costs one look at the table's version for each publish, or
none where the copy is young enough and either knows a queue for the key (durable direct and topic exchanges: their
bindings are no replies that somebody waits for) or serves a fanout of a message that is not to be kept (events).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from amqp.exceptions import NotFound, PreconditionFailed

from ..topics import matches

if TYPE_CHECKING:
    from ..message import QueueSpec
    from .shared import SharedEngine

logger = logging.getLogger(__name__)

TYPES = ("direct", "topic", "fanout")
#: exchanges that exist without a declaration, as on an AMQP server
_BUILT_IN = {"amq.direct": "direct", "amq.topic": "topic", "amq.fanout": "fanout"}
#: seconds that a durable exchange may route by its copy, the same for messages that nobody misses, and how many routes
#: are kept
_FRESH, _FLEETING, _ROUTES = 1.0, 30.0, 10_000


@dataclass(frozen=True, slots=True)
class Exchange:
    type: str = "direct"
    durable: bool = False
    auto_delete: bool = False

    @property
    def live(self) -> bool:
        """Whether it also reaches subscribers that store nothing."""
        return self.type != "direct"


class Binding(NamedTuple):
    exchange: str
    queue: str
    key: str
    #: the queue is only published to while it exists
    transient: bool = False

    @property
    def row(self) -> str:
        return json.dumps([self.exchange, self.queue, self.key])

    def takes(self, exchange: Exchange, key: str) -> bool:
        if exchange.type == "fanout":
            return matches(self.pattern(exchange), key)
        return self.key == key or (exchange.type == "topic" and self.key != "" and matches(self.key, key))

    def pattern(self, exchange: Exchange) -> str:
        """What to listen for: covers all that the binding takes; empty is everything.

        An AMQP fanout takes everything, but Celery's gossip, which binds with `worker.#`, must not get each event of
        each task.
        """
        if exchange.type == "fanout" and "*" not in self.key and "#" not in self.key:
            return ""
        return self.key


class Route(NamedTuple):
    #: also goes to live subscribers
    live: bool
    queues: tuple[Binding, ...]


@lru_cache(maxsize=4096)
def _binding(row: str, value: str) -> Binding | None:
    try:
        words = json.loads(row)
    except (ValueError, RecursionError):
        words = None
    if not isinstance(words, list) or len(words) != 3 or not all(isinstance(word, str) for word in words):
        logger.warning("routing table: row %r is none of ours and is ignored", row)
        return None
    return Binding(words[0], words[1], words[2], value == "transient")


class Router:
    """Routing of one engine in this process. Thread-safe: copies are replaced as a whole."""

    def __init__(self, shared: SharedEngine) -> None:
        self._shared = shared
        self._exchanges: dict[str, Exchange] = {}
        #: declared here, to be made again where the store has lost them
        self._own: dict[str, set[Binding]] = {}
        self._own_queues: dict[str, QueueSpec] = {}
        self._copied: Mapping[str, str] | None = None
        self._by_exchange: dict[str, list[Binding]] = {}
        self._by_key: dict[tuple[str, str], list[Binding]] = {}
        #: what durable exchanges route by while the copy is fresh
        self._routes: dict[tuple[str, str, bool], Route] = {}
        # own changes so far, and how many of them the copy has
        self._changes, self._seen = 1, 0

    # Exchanges

    def declare_exchange(self, name: str, exchange: Exchange) -> None:
        """Raises PreconditionFailed (406) where it exists with another type or durability."""
        if exchange.type not in TYPES:
            raise PreconditionFailed(f"exchange {name!r}: type {exchange.type!r} is not supported, only "
                                     f"{', '.join(TYPES)} are", (40, 10), "Channel.exchange_declare")
        known = self._stored_exchange(name)
        if known is None:
            self._put_exchange(name, exchange)
        elif (known.type, known.durable) != (exchange.type, exchange.durable):
            raise PreconditionFailed(
                f"exchange {name!r} exists as {_described(known)} and cannot be declared as {_described(exchange)}; "
                "use another name, or delete it first", (40, 10), "Channel.exchange_declare")
        self._exchanges[name] = known or exchange

    def check_exchange(self, name: str) -> None:
        """Raises NotFound (404)."""
        if name not in _BUILT_IN and self._stored_exchange(name) is None:
            raise NotFound(f"no exchange {name!r}", (40, 10), "Channel.exchange_declare")

    def delete_exchange(self, name: str, if_unused: bool) -> bool:
        rows = [binding.row for binding in self.bindings() if binding.exchange == name]
        if if_unused and rows:
            return False
        self._shared.table("bindings").delete(rows)
        self._shared.table("exchanges").delete([name])
        self._exchanges.pop(name, None)
        self._own.pop(name, None)
        self._changes += 1
        return True

    def exchange(self, name: str) -> Exchange:
        """As declared by anyone; direct when nobody did."""
        known = self._exchanges.get(name)
        if known is None:
            known = self._stored_exchange(name)
            if known is None:
                return Exchange(_BUILT_IN.get(name, "direct"))
            self._exchanges[name] = known
        return known

    def _stored_exchange(self, name: str) -> Exchange | None:
        value = self._shared.table("exchanges").rows().get(name)
        if value is None:
            return None
        try:
            fields = json.loads(value)
            return Exchange(fields["type"], fields["durable"], fields["auto_delete"])
        except (ValueError, KeyError, TypeError):
            logger.warning("routing table: exchange %r has a row that is none of ours and is ignored", name)
            return None

    def _put_exchange(self, name: str, exchange: Exchange) -> None:
        self._shared.table("exchanges").put(name, json.dumps({
            "type": exchange.type, "durable": exchange.durable, "auto_delete": exchange.auto_delete}))

    # Bindings

    def bind(self, binding: Binding) -> None:
        self._put(binding)
        self._own.setdefault(binding.exchange, set()).add(binding)

    def unbind(self, exchange: str, queue: str, key: str) -> None:
        self.delete_rows([Binding(exchange, queue, key)])

    def is_bound_here(self, queue: str) -> bool:
        return any(binding.queue == queue for own in self._own.values() for binding in tuple(own))

    def drop_queue(self, queue: str, *, look: bool) -> None:
        """Forget a queue that was deleted, with its bindings: with `look` all that the store has, else our own."""
        self._own_queues.pop(queue, None)
        own = [binding for bindings in self._own.values() for binding in tuple(bindings)]
        known = self.bindings() if look else own
        self.delete_rows([binding for binding in known if binding.queue == queue], gone=not look)

    def remember_queue(self, spec: QueueSpec) -> None:
        self._own_queues[spec.name] = spec

    def bindings(self) -> Iterator[Binding]:
        """All on the store."""
        self._refresh()
        for bindings in self._by_exchange.values():
            yield from bindings

    def _put(self, binding: Binding) -> None:
        self._shared.table("bindings").put(binding.row, "transient" if binding.transient else "durable",
                                    binding.queue if binding.transient else "")
        self._changes += 1

    def delete_rows(self, bindings: list[Binding], *, gone: bool = False) -> None:
        """Remove bindings, from the store too unless they are `gone` from it, and exchanges that end with their last
        one."""
        rows = {binding.row for binding in bindings}
        if not gone:
            self._shared.table("bindings").delete(rows)
        self._changes += 1
        for name in {binding.exchange for binding in bindings}:
            own = self._own.get(name, set())
            own.difference_update([binding for binding in own if binding.row in rows])
            if self.exchange(name).auto_delete:
                self.delete_exchange(name, if_unused=True)

    # Routes

    def route(self, name: str, key: str, *, fleeting: bool = False) -> Route:
        """Where a message goes. What this process declared and the store has lost (FLUSHALL, deleted keys) is made
        again first. `fleeting`: a message that nobody misses, such as an event of a worker."""
        age = _FLEETING if fleeting else _FRESH
        if self._seen == self._changes and self._shared.table("bindings").rows(
                age, patient=not fleeting) is self._copied:
            known = self._routes.get((name, key, fleeting))
            if known is not None:
                return known
        exchange = self.exchange(name)
        route = self._look(name, exchange, key, patient=not fleeting)
        if not route.queues and self._make_again(name, exchange, key):
            route = self._look(name, exchange, key)
        lasts = fleeting if exchange.type == "fanout" else exchange.durable and route.queues
        if lasts and len(self._routes) < _ROUTES:
            self._routes[name, key, fleeting] = route
        return route

    def _look(self, name: str, exchange: Exchange, key: str, patient: bool = True) -> Route:
        self._refresh(patient)
        if exchange.type == "direct":
            found = self._by_key.get((name, key), [])
        else:
            found = [binding for binding in self._by_exchange.get(name, ()) if binding.takes(exchange, key)]
        if len(found) > 1:
            found = list({binding.queue: binding for binding in found}.values())
        return Route(exchange.live, tuple(found))

    def _refresh(self, patient: bool = True) -> None:
        changes = self._changes
        rows = self._shared.table("bindings").rows(patient=patient)
        if rows is not self._copied:
            by_exchange: dict[str, list[Binding]] = {}
            by_key: dict[tuple[str, str], list[Binding]] = {}
            for row, value in rows.items():
                binding = _binding(row, value)
                if binding is not None:
                    by_exchange.setdefault(binding.exchange, []).append(binding)
                    by_key.setdefault((binding.exchange, binding.key), []).append(binding)
            self._by_exchange, self._by_key, self._routes, self._copied = by_exchange, by_key, {}, rows
        self._seen = changes

    def _make_again(self, name: str, exchange: Exchange, key: str) -> bool:
        lost = [binding for binding in tuple(self._own.get(name, ()))
                if binding.queue in self._own_queues and not binding.transient and binding.takes(exchange, key)]
        if not lost:
            return False
        logger.warning("the store has lost the routing of exchange %r; it is made again: %s", name,
                       ", ".join(sorted(binding.queue for binding in lost)))
        if name in self._exchanges:
            self._put_exchange(name, self._exchanges[name])
        for binding in lost:
            self._shared.engine.declare(self._own_queues[binding.queue])
            self._put(binding)
        return True


def _described(exchange: Exchange) -> str:
    return f"{'durable' if exchange.durable else 'transient'} {exchange.type}"

