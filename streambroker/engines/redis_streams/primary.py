"""Which server is the primary now: asked for each new connection, and watched, so that a demoted one is let go of at
once. It takes writes for some ten seconds after a planned failover, and all that its successor had not seen when it was
promoted is lost. So nothing is connected from the moment that a sentinel chooses the successor until it is named.
"""

from __future__ import annotations

import _socket
import logging
import random
import socket
import time
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import redis
import redis.exceptions

from ... import fork
from ...chores import Chores
from ...errors import AuthenticationError, StoreConnectionError, StoreError
from ...keeper import Keeper
from ...real import make_lock
from ...settings import Settings
from .client import Address, dialer
from .commands import Commands
from .link import Dial, Link
from .resp import pack, text_of
from .sentinel import Answer, Place, SentinelAddress, Sentinels, told

logger = logging.getLogger(__name__)

#: a sentinel leads a failover; it is over; it came to nothing
BEGINS, SWITCHED, ABORTED = ("+failover-state-select-slave", "+switch-master",
                             ("-failover-abort-no-good-slave", "-failover-abort-slave-timeout"))
#: how often a sentinel is asked, although all is well: a group may be made anew by hand, without an event; and while no
#: subscription stands
LOOK, LOOK_DEAF = 30.0, 1.0
#: a silent subscription is asked for a sign of life this often, and is dead when none comes in time
PING_EVERY, PING_PATIENCE = 5.0, 2.0
#: pauses before a subscription is tried again: after a lost link, and after a refusal
AGAIN, REFUSED = 2.0, 30.0
#: how long a failover keeps everybody away at most, and how often it is asked meanwhile whether it is over
HOLD, LOOK_HELD = 5.0, 0.25
#: for how long after a switch sentinels may not have heard of it
HEARSAY = 10.0


class Subscription:
    """To one sentinel's news. For the watch's thread alone."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._heard, self._asked = 0.0, False
        self._retry_at = 0.0

    @property
    def stands(self) -> bool:
        return self._link.is_open

    def fileno(self) -> int:
        return self._link.fileno()

    def due(self) -> float:
        if not self._link.is_open:
            return self._retry_at
        return self._heard + PING_EVERY + (PING_PATIENCE if self._asked else 0.0)

    def news(self) -> list[tuple[str, list[str]]]:
        """Events and their words; an empty one when the subscription is new, since something may have happened
        before."""
        now = time.monotonic()
        try:
            if not self._link.is_open:
                return self._subscribe() if now >= self._retry_at else []
            replies = self._link.poll()
            if replies:
                self._heard, self._asked = now, False
            elif now >= self.due():
                if self._asked:
                    raise StoreConnectionError("no sign of life")
                self._asked = True
                self._link.send(pack("PING"))
            return [(text_of(reply[1]), text_of(reply[2]).split(" ")) for reply in replies
                    if isinstance(reply, list) and reply[0] == b"message"]
        except (StoreConnectionError, StoreError) as error:
            self._link.close()
            self._retry_at = time.monotonic() + (REFUSED if isinstance(error, StoreError) else AGAIN)
            logger.debug("no subscription to a sentinel: %s", error)
            return []

    def _subscribe(self) -> list[tuple[str, list[str]]]:
        self._link.open()
        events = (BEGINS, SWITCHED, *ABORTED)
        self._link.send(pack("SUBSCRIBE", *events))
        for _ in events:
            Commands.check(self._link.read())
        self._heard, self._asked = time.monotonic(), False
        return [("", [])]

    def close(self) -> None:
        self._link.close()

    def abandon(self) -> None:
        self._link.abandon()
        self._retry_at = 0.0


class PrimaryWatch:
    """`dial` connects to the primary, `stop` ends the watch. One for each engine and process: a thread from the first
    answer on, which is subscribed at every sentinel. Thread-safe; in a forked child it starts anew."""

    def __init__(self, address: SentinelAddress, settings: Settings, chores: Callable[[], Chores]) -> None:
        self._address = address
        self._chores = chores
        self._sentinels = Sentinels(address, settings)
        self._connect = dialer(address, settings)
        self._keeper = Keeper(self._turn, lambda: [each.fileno() for each in self._subscriptions])
        self._start()
        fork.register(self)

    def _start(self) -> None:
        self._lock = make_lock()
        self._over = False
        self._subscriptions = [Subscription(self._sentinels.link(place)) for place in self._address.sentinels]
        #: the one that answered last is asked first
        self._order = list(self._address.sentinels)
        self._epoch = -1
        self._primary: Place | None = None
        self._switched = float("-inf")
        #: nobody connects before that time
        self._held_until = 0.0
        self._next_look = 0.0
        self._deaf = False
        #: connections, also those that are being made, and where they lead
        self._connections: weakref.WeakKeyDictionary[redis.Connection, Place] = weakref.WeakKeyDictionary()

    # ------------------------------------------------------------------ connecting
    def dial(self, timeout: float) -> redis.Connection:
        """A connection to what is the primary by the sentinels' word and its own. Raises StoreConnectionError,
        AuthenticationError and errors of redis-py."""
        if self._held:
            raise StoreConnectionError(f"a failover of the primary {self._address.name!r} is under way")
        place = self.primary()
        with self._lock:
            # not before the client has imported all that it needs: where threads are green no lock of an import may be
            # wanted by two real ones
            if not self._over:
                self._keeper.start()
        connection: redis.Connection = self._connect(timeout, host=place[0], port=place[1],
                                                     redis_connect_func=partial(self._greet, place))
        try:
            connection.connect()  # type: ignore[no-untyped-call]
        except BaseException as error:
            connection.disconnect()  # type: ignore[no-untyped-call]
            if isinstance(error, (redis.exceptions.AuthenticationError, redis.exceptions.BusyLoadingError)):
                raise
            if isinstance(error, (redis.exceptions.RedisError, OSError)):
                raise redis.exceptions.ConnectionError(
                    f"{told(place)}, which the sentinels name as the primary {self._address.name!r}, cannot be used: "
                    f"{error}; it must be reachable from here under that address, with "
                    "TLS or without as the option ssl says") from (error.__cause__ or error)
            raise
        return connection

    def _greet(self, place: Place, connection: redis.Connection) -> None:
        with self._lock:
            self._connections[connection] = place
            stale = self._primary != place or self._held
        if stale:
            raise redis.exceptions.ConnectionError("it is being replaced")
        connection.on_connect()  # type: ignore[no-untyped-call]
        connection.send_command("ROLE")  # type: ignore[no-untyped-call]
        role: Any = connection.read_response()
        if role[0] != b"master":
            raise redis.exceptions.ConnectionError(f"it is a {role[0].decode()} now, the failover is not over")

    def primary(self) -> Place:
        """Asks the sentinels in turn. Raises StoreConnectionError, AuthenticationError."""
        late: Answer | None = None
        failed: list[Exception] = []
        for place in list(self._order):
            try:
                answer = self._sentinels.ask(place)
            except (StoreConnectionError, StoreError) as error:
                failed.append(error)
                continue
            if answer.epoch >= self._epoch:
                self._order = [place, *(other for other in self._order if other != place)]
                return self._learn(answer)
            if late is None or answer.epoch > late.epoch:
                late = answer
        if late is not None and time.monotonic() - self._switched > HEARSAY:
            return self._learn(late, anew=True)
        raise self._nobody(failed, late)

    def _nobody(self, failed: list[Exception], late: Answer | None) -> StoreConnectionError:
        if late is not None:
            return StoreConnectionError(f"the sentinels that answer have not heard of the switch from "
                                        f"{told(late.primary)} yet")
        # what a sentinel says is worth more than that another one is silent
        refused = [error for error in failed if isinstance(error, (StoreError, AuthenticationError))]
        if refused:
            kind = AuthenticationError if isinstance(refused[0], AuthenticationError) else StoreConnectionError
            return kind(str(refused[0]))
        return StoreConnectionError(f"no sentinel answers ({'; '.join(map(str, failed))}): do they run, and are their "
                                    "addresses right?")

    # ------------------------------------------------------------------ knowing
    def _learn(self, answer: Answer, anew: bool = False) -> Place:
        """What is the primary now. All connections to another one end."""
        with self._lock:
            if answer.epoch < self._epoch and not anew and self._primary is not None:
                return self._primary
            self._epoch = answer.epoch
            before, self._primary = self._primary, answer.primary
            switched = before is not None and before != answer.primary
            if switched:
                self._switched, self._held_until = time.monotonic(), 0.0
            stale = [connection for connection, place in self._connections.items() if place != answer.primary]
        cut(stale)
        if switched and before is not None:
            self._chores().say(logging.WARNING, "the primary %s is %s now, no longer %s: connections are opened anew",
                               self._address.name, told(answer.primary), told(before))
        return answer.primary

    @property
    def _held(self) -> bool:
        return time.monotonic() < self._held_until

    def _happened(self, event: str, words: list[str]) -> None:
        if event == SWITCHED and len(words) == 5 and words[0] == self._address.name:
            old, new = (words[1], int(words[2])), (words[3], int(words[4]))
            if new != self._primary and old == self._primary:
                # a switch raises the epoch, by one at least
                self._learn(Answer(self._epoch + 1, new))
        elif event and event != SWITCHED and words[:2] == ["master", self._address.name] and len(words) >= 4:
            with self._lock:
                held = event == BEGINS and (words[2], int(words[3])) == self._primary
                self._held_until = time.monotonic() + HOLD if held else 0.0
                connections = list(self._connections) if held else []
            cut(connections)

    # ------------------------------------------------------------------ the thread
    def _turn(self) -> float:
        look = False
        for subscription in self._subscriptions:
            for event, words in subscription.news():
                look = True
                self._happened(event, words)
        now = time.monotonic()
        if look or now >= self._next_look:
            self._look(now)
        return max(0.0, min(self._next_look, *(each.due() for each in self._subscriptions)) - time.monotonic())

    def _look(self, now: float) -> None:
        stand = any(each.stands for each in self._subscriptions)
        self._next_look = now + (
            LOOK_HELD if self._held else LOOK * random.uniform(0.8, 1.2) if stand else LOOK_DEAF)
        try:
            self.primary()
        except StoreConnectionError as error:
            self._chores().report(f"no word of the primary: {error}")
            self._deaf = True
            self._next_look = now + LOOK_DEAF
            return
        if self._deaf:
            self._deaf = False
            self._chores().report("the sentinels answer again", calm=True)

    def stop(self) -> None:
        """Connections stay; nothing watches them any more."""
        with self._lock:
            self._over = True
        self._keeper.stop()
        for subscription in self._subscriptions:
            subscription.close()

    def after_fork(self) -> None:
        for subscription in self._subscriptions:
            subscription.abandon()
        self._keeper.after_fork()
        self._start()


def dialing(address: Address, settings: Settings, chores: Callable[[], Chores]) -> tuple[Dial, Callable[[], None]]:
    """How to connect, and what ends that."""
    if isinstance(address, SentinelAddress):
        watch = PrimaryWatch(address, settings, chores)
        return watch.dial, watch.stop
    return dialer(address, settings), lambda: None


def cut(connections: Iterable[redis.Connection]) -> None:
    """Whoever reads, writes or waits there finds the link broken, in any thread or greenlet."""
    for connection in connections:
        sock: Any = connection._sock
        # those of eventlet and gevent may be touched by their own thread alone: the real one is inside
        real = next((each for each in (getattr(sock, "fd", None), getattr(sock, "_sock", None), sock)
                     if isinstance(each, _socket.socket)), None)
        try:
            if real is not None:
                _socket.socket.shutdown(real, socket.SHUT_RDWR)
        except OSError:
            continue  # closed meanwhile
