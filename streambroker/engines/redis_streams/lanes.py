"""What a consumer in a cluster has to a node, and what it knows of a queue."""

from __future__ import annotations

import logging
import time
from typing import Any

from ...chores import Chores
from ...errors import StoreConnectionError
from .cluster import Cluster, Node, slot_of
from .pipe import Expected, Pipe
from .pull import PATIENCE, PAUSES
from .resp import pack

logger = logging.getLogger(__name__)

#: longest step of connecting to a node: the queues of the others wait for it
CONNECT = 2.0
#: seconds after which a node that is not there is nobody's any more
FORGOTTEN = 60.0


class Lane:
    """The connection to a node, and when to try again where there is none."""

    def __init__(self, cluster: Cluster, node: Node) -> None:
        self.node = node
        self.pipe = Pipe(cluster.link(node))
        self._cluster = cluster
        self._tries = 0
        self.retry_at = 0.0

    def ready(self, now: float) -> bool:
        """Connects where there is none, and when it is time to try."""
        if self.pipe.is_open:
            return True
        if now < self.retry_at:
            return False
        start = time.monotonic()
        try:
            self.pipe.open(CONNECT)
        except StoreConnectionError as error:
            logger.debug("no link to %s: %s", self.node, error)
            # who does not even refuse takes time that the other queues need
            self.failed(4 * (time.monotonic() - start))
            return False
        self._tries = 0
        return True

    def failed(self, rest: float = 0.0) -> None:
        """Not again at once, and not within `rest` seconds."""
        self.retry_at = time.monotonic() + max(rest, PAUSES[min(self._tries, len(PAUSES) - 1)])
        self._tries += 1


class Lanes:
    """To the nodes of the queues that are consumed, and of others as there is something for them."""

    def __init__(self, cluster: Cluster, reconnect_timeout: float, chores: Chores) -> None:
        self._cluster = cluster
        self._reconnect_timeout = reconnect_timeout
        self._chores = chores
        self._lanes: dict[Node, Lane] = {}
        self._missing = False
        self._down_since: float | None = None
        self._troubled = False
        self._retry_at = 0.0

    def all(self) -> list[Lane]:
        return [*self._lanes.values()]

    def open(self) -> list[Lane]:
        return [lane for lane in self._lanes.values() if lane.pipe.is_open]

    def to(self, node: Node) -> Lane:
        lane = self._lanes.get(node)
        if lane is None:
            lane = self._lanes[node] = Lane(self._cluster, node)
        return lane

    def ready(self, slot: int, now: float) -> Lane | None:
        """An open one to whom a slot belongs."""
        try:
            lane = self.to(self._cluster.node_of(slot))
        except StoreConnectionError:
            return None
        return lane if lane.ready(now) else None

    def connect(self, slots: set[int], now: float) -> None:
        """Have one for each of `slots`. Raises StoreConnectionError when there has been none for `reconnect_timeout`;
        while there are some, their queues are served."""
        trouble = "nobody answers"
        lanes = {slot: self.ready(slot, now) for slot in slots}
        if None in lanes.values() and now >= self._retry_at:
            try:
                self._cluster.renew(CONNECT)
            except StoreConnectionError as error:
                trouble = str(error)
            self._retry_at = time.monotonic() + PAUSES[2]
            lanes = {slot: lane or self.ready(slot, now) for slot, lane in lanes.items()}
        self._missing = None in lanes.values()
        self._lanes = {node: lane for node, lane in self._lanes.items()
                       if lane.pipe.is_open or now - lane.retry_at < FORGOTTEN}
        self._judge([lane is not None for lane in lanes.values()], now, trouble)

    def _judge(self, ready: list[bool], now: float, trouble: str) -> None:
        if all(ready):
            if self._troubled:
                self._chores.report("all nodes are connected again", calm=True)
            self._troubled, self._down_since = False, None
            return
        if not self._troubled:
            self._troubled = True
            self._chores.report("a node of the cluster cannot be reached, its queues wait")
        if any(ready):
            self._down_since = None
        elif self._down_since is None:
            self._down_since = now
        elif now - self._down_since >= self._reconnect_timeout:
            self._down_since = None
            raise StoreConnectionError(f"the store cannot be reached: {trouble}")

    def due(self, now: float) -> list[float | None]:
        """Seconds until there is something to do, of each."""
        times = [lane.pipe.due(now) for lane in self._lanes.values() if lane.pipe.is_open]
        if self._missing:
            times.append(max(0.0, self._retry_at - now))
        return times


class Batch:
    """What goes to each node in one write."""

    def __init__(self, lanes: Lanes, now: float, late: float) -> None:
        self._lanes = lanes
        self._now = now
        self._late = late
        self._parts: dict[Lane, tuple[list[bytes], list[Expected]]] = {}

    def add(self, slot: int, data: bytes, kind: str, about: Any) -> bool:
        """False when the node of that slot is not connected."""
        lane = self._lanes.ready(slot, self._now)
        if lane is not None:
            self.add_to(lane, data, Expected(kind, about, self._late))
        return lane is not None

    def add_to(self, lane: Lane, data: bytes, expected: Expected) -> None:
        parts, answers = self._parts.setdefault(lane, ([], []))
        parts.append(data)
        answers.append(expected)

    def send(self) -> list[tuple[Lane, StoreConnectionError]]:
        """Those that broke."""
        broken = []
        for lane, (parts, answers) in self._parts.items():
            try:
                lane.pipe.send(parts, answers)
            except StoreConnectionError as error:
                broken.append((lane, error))
        return broken


class Place:
    """One queue: whether it is worth asking, and its wait."""

    def __init__(self, queue: str, bell: str) -> None:
        self.queue = queue
        self.bell = bell
        self.slot = slot_of(bell)
        #: the last take found less than it could carry
        self.idle = False
        #: it was asked since the consumer was told to ask again
        self.asked = False
        #: its bell has rung and nobody was sent for what it rang for
        self.rung = False
        self.waiter: Pipe | None = None
        #: where it waits
        self.node: Node | None = None
        self.next_due: float | None = None
        self.next_look = 0.0
        self.rest_until = 0.0

    @property
    def armed(self) -> bool:
        return self.waiter is not None and not self.waiter.quiet

    def wait(self, cluster: Cluster, now: float, block: float, passed: bytes) -> None:
        """On its bell for at most `block` seconds, then do `passed`. Raises StoreConnectionError."""
        node, late = cluster.node_of(self.slot), now + block + PATIENCE
        if self.waiter is None:
            self.node = node
            self.waiter = Pipe(cluster.link(node))
            self.waiter.open(CONNECT)
        self.waiter.send([pack("BLPOP", self.bell, f"{block:.3f}"), passed],
                         [Expected("bell", (self, node), late), Expected("passed", (self, node), late)])

    def stop_waiting(self) -> None:
        """What its bell rings for in this moment is for somebody else."""
        if self.waiter is not None:
            self.rung = self.rung or self.armed
            self.waiter.close()
            self.waiter = None
