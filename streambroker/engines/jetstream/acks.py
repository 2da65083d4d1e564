"""Acknowledgements: single frames that nobody answers, sent in groups; the last ones before a break are sent again
after it, which changes nothing where they had arrived.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from ...errors import StoreConnectionError
from ...together import Together
from .frames import Frame, Reply, read_place
from .loop import Wake

if TYPE_CHECKING:
    from .engine import JetStreamEngine

#: the words that settle a message, and the one that keeps it
ACK, NAK, TERM, BUSY = b"+ACK", b"-NAK", b"+TERM", b"+WPI"
#: acks that are sent without waiting for more, and the longest wait of fewer (seconds)
WINDOW, WINDOW_TIME = 16, 0.005
#: acks of so many seconds are sent again after a break
DOUBTFUL = 5.0
#: one try to have acks confirmed, at least when there is no patience, and the pause between two (seconds)
TRY, LEAST, PAUSE = 3.0, 0.5, 0.1


def _consumer_of(reply: str) -> str:
    """The part of an ack's subject that names the consumer."""
    return reply.rsplit(".", 5)[0]


class Acks:
    """Of one engine; from any thread where nothing else is said. A message is named by the subject that acknowledges
    it."""

    def __init__(self, engine: JetStreamEngine) -> None:
        self._engine = engine
        self.start()

    def start(self) -> None:
        """As new: none is on its way."""
        self._waiting: deque[str] = deque()
        self._armed = Wake()
        #: when the first of those that wait was put there (monotonic), and how many ever were
        self._since = 0.0
        self._count = self._counted = 0
        self._sent: deque[tuple[float, str]] = deque(maxlen=5000)
        self._together = Together(self._confirm)

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, reply: str) -> None:
        if not self._waiting:
            self._since = time.monotonic()
        self._waiting.append(reply)
        self._count += 1
        if len(self._waiting) >= WINDOW:
            self.send()
        else:
            self._armed.ask(lambda: self._engine.link.call_soon(self._arm))

    def _arm(self) -> None:
        self._engine.link.call_later(WINDOW_TIME, self._window_over)

    def _window_over(self) -> None:
        if not self._engine.link.connected:
            # all go when it is
            self._armed.on = False
            return
        if self._waiting or self._count != self._counted:
            # there will be more: that this thread wakes by itself costs less than to be woken
            self._counted = self._count
            self._arm()
            self.send_due(time.monotonic())
            return
        self._armed.on = False
        if self._waiting:
            # it came before that was known
            self._armed.ask(self._arm)

    def send_due(self, now: float) -> None:
        """Those that have waited for others long enough."""
        if self._waiting and now - self._since >= WINDOW_TIME:
            self.send()

    def send(self, frame: Frame | None = None) -> bool:
        """All that wait, and `frame` behind them, unless the link is broken: False."""
        replies = []
        try:
            while True:
                replies.append(self._waiting.popleft())
        except IndexError:
            pass
        if not replies and frame is None:
            return True
        if not self._engine.link.acknowledge(replies, () if frame is None else (frame,)):
            self._waiting.extendleft(reversed(replies))
            return False
        now = time.monotonic()
        self._sent.extend([(now, reply) for reply in replies])
        return True

    def confirm(self, reply: str) -> None:
        """Returns when the server has confirmed. Raises StoreConnectionError after `publish_timeout`."""
        self._together.do(reply)

    def _confirm(self, replies: list[str]) -> None:
        """A consumer's acks are handled in their order, so the answer to its last one is for all."""
        settings = self._engine.settings
        last = {_consumer_of(reply): reply for reply in replies}
        others = [Frame(reply, ACK) for reply in replies if last[_consumer_of(reply)] != reply]
        end = time.monotonic() + settings.publish_timeout
        while True:
            wait = min(TRY, settings.socket_timeout, max(LEAST, end - time.monotonic()))
            answers = self._engine.plain.requests([Frame(reply, ACK) for reply in last.values()], wait, others)
            if all(answer is not None and not answer.status for answer in answers):
                return
            if time.monotonic() >= end:
                raise StoreConnectionError("the server does not confirm acknowledgements")
            time.sleep(PAUSE)

    def reconnected(self) -> None:
        """In the link's thread."""
        start = time.monotonic() - DOUBTFUL
        again = [reply for when, reply in list(self._sent) if when >= start]
        if again:
            self._engine.link.acknowledge(again)
        for reply in [*again, *list(self._waiting)]:
            place = read_place(Reply("", b"", reply))
            if place is not None:
                self._engine.claims.remember((place.stream, place.sequence), place.time)
        self.send()

    def last(self) -> list[Frame]:
        """The newest of each consumer in the last second: an answer to one of them tells that all before are done."""
        start, newest = time.monotonic() - 1.0, {}
        for when, reply in list(self._sent):
            if when >= start:
                newest[_consumer_of(reply)] = reply
        return [Frame(reply, ACK) for reply in newest.values()]
