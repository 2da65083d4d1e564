"""What the keeper does for the Redis Streams engine, in its own thread on its own connections: signs of life, the look
for the dead, reclaiming, promoting, old dead letters, settlements that nobody sends, and entries whose delivery never
arrived.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ...errors import StoreConnectionError, StoreError
from ...keeper import Keeper
from ...message import Delivery
from .holder import Mark
from .keys import FREE, GROUP, LAST, ONCE
from .lookout import Lookout
from .registry import read_info
from .resp import ReplyError, pack, text_of
from .settles import Settle

if TYPE_CHECKING:
    from .engine import RedisStreamsEngine

#: how a holder ended; one more than that: with messages of several queues
LEFT, DIED = 0, 1
#: entries in one script call, some milliseconds of the server's time
PAGE = 500
#: a settlement that waits longer than this is sent by the keeper
STALE = 0.1
#: when an answer that may have gone nowhere is searched, after the doubt arose: it shows soon, but a server that still
#: believes in a dead connection ends its wait within the block time
CHECKS = (0.2, 0.8, 2.0, 4.0, 8.0, 12.0, 20.0)
#: how often groups are searched for holders that nobody knows
ORPHANS = 300.0
#: how often dead letters that are too old are removed, or after their age where that is shorter, but not below
EXPIRE, EXPIRE_LEAST = 300.0, 1.0
#: and how many in one call: it blocks the server
EXPIRE_PAGE = 500


class Maintenance:
    """Runs from the first consumer of an engine to its close. Its state belongs to the keeper's thread, except for
    the wishes that other threads leave in it, each one assignment."""

    def __init__(self, engine: RedisStreamsEngine) -> None:
        self._engine = engine
        self._commands = engine.make_commands(patience=0.5, timeout=engine.settings.visibility_timeout / 3)
        self._lookout = Lookout(engine)
        self.keeper = Keeper(self._turn, lambda: [self._lookout.fileno()])
        self._greeted = False
        self._next_orphans = 0.0
        self._next_expire = 0.0
        self._next_full_check = 0.0
        #: since when, and when to look next
        self._doubts: dict[str, tuple[float, float]] = {}
        self._unknown: dict[tuple[str, str, int], float] = {}
        #: earliest due time of delayed messages that this process knows of, by queue
        self.due: dict[str, float] = {}
        self._trouble = 0

    def doubt(self, queue: str) -> None:
        """Something of `queue` may have been handed to this process and never arrived."""
        now = time.monotonic()
        self._doubts[queue] = now, now + CHECKS[0]
        self.keeper.wake_within(CHECKS[0])

    def expect_due(self, queue: str, when: float) -> None:
        known = self.due.get(queue)
        if known is None or when < known - 0.001:
            self.due[queue] = when
            self.keeper.wake_within(max(0.0, when - time.monotonic()))

    # ------------------------------------------------------------------ the turn
    def _turn(self) -> float:
        try:
            pause = self._work(time.monotonic())
            if self._trouble:
                self._trouble = 0
                self._engine.chores.report("the keeper works again", calm=True)
            return pause
        except (StoreConnectionError, StoreError) as error:
            self._trouble += 1
            self._lookout.look_soon()
            self._engine.chores.report(f"the keeper cannot renew leases now: {error}")
            return min(0.1 * self._trouble, 1.0)

    def _work(self, now: float) -> float:
        if self._engine.registry.registered:
            if not self._greeted:
                self._greet()
            self._lookout.listen()
            if self._lookout.wants_look(now):
                self._look()
            self._lookout.show_life(now)
        self._refresh_transient(now)
        self._promote(now)
        self._flush_stale(now)
        self._check_doubts(now)
        if now >= self._next_orphans:
            self._next_orphans = now + ORPHANS
            self._reclaim_orphans()
        if now >= self._next_expire:
            self._next_expire = now + max(EXPIRE_LEAST, min(EXPIRE, self._engine.settings.dead_letter_max_age))
            self._expire_dead()
        return self._pause(time.monotonic())

    def _pause(self, now: float) -> float:
        times = [self._next_orphans, self._next_expire, *self.due.values()]
        if self._engine.registry.registered:
            times.append(self._lookout.due())
        times += [consumer.plan.next_refresh + 0.5 for consumer in self._engine.consumers_open() if not consumer.closed]
        if self._engine.oldest_settle() is not None:
            times.append(now + STALE)
        times += [check for _, check in self._doubts.values()]
        return max(0.0, min(times) - now)

    # ------------------------------------------------------------------ life and death
    def _greet(self) -> None:
        """Say what is in force, and warn of a server that may throw messages away."""
        self._greeted = True
        chores, settings = self._engine.chores, self._engine.settings
        chores.say(logging.INFO, "consuming from %s: lease %g s, delivery limit %s", self._engine.address,
                   settings.visibility_timeout, settings.delivery_limit or "none")
        memory = self._commands.call("INFO", "memory").decode(errors="replace")
        policy = next((line.partition(":")[2].strip() for line in memory.splitlines()
                       if line.startswith("maxmemory_policy:")), "noeviction")
        if policy != "noeviction":
            chores.say(logging.WARNING, "the server's maxmemory-policy is %s: when memory is full it may delete queued "
                       "messages; set it to noeviction", policy)

    def _look(self) -> None:
        engine = self._engine
        known, others, gone, expired, heard = self._commands.run(engine.registry.look_command())
        if not heard:
            self._lookout.unheard()
        if not known:
            self._reborn()
            return
        if not others:
            self._lookout.alone()
        for holder, info in zip(gone[::2], gone[1::2], strict=True):
            self._reclaim(text_of(holder), info)
        for queue in expired:
            engine.queues.expired(text_of(queue), self._commands)

    def _reborn(self) -> None:
        """This process was declared gone: it was silent for a lease, or the registry was lost. Under a new name it
        keeps what nobody has taken yet."""
        engine = self._engine
        old, new = engine.holder.rename()
        engine.registry.register(self._commands, engine.known_queues())
        engine.chores.say(logging.WARNING, "this worker was taken for gone, since it was silent for its lease "
                          "or the registry was lost; it goes on as %s", new)
        self._adopt(old, new)
        for queue in engine.consumed():
            self.doubt(queue)

    def _adopt(self, old: str, new: str) -> None:
        mine = {(delivery.queue, delivery.id): delivery for delivery in self._engine.holder.mine()}
        own = self._move(old, new, mine)
        left = [delivery for place, delivery in mine.items() if place not in own]
        if not left:
            return
        queues = list({delivery.queue for delivery in left})
        # without a reclaim nobody has them: the store lost all
        reclaimed = self._commands.many([pack("EXISTS", self._engine.keys.gone(queue, old)) for queue in queues])
        taken = {queue for queue, there in zip(queues, reclaimed, strict=True) if there == 1}
        for delivery in left:
            if delivery.queue in taken:
                delivery.take_away()
            else:
                delivery.lost = True

    def _move(self, old: str, new: str, places: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
        """From the old name of this process to its new one; those that the old one had."""
        streams: dict[tuple[str, int], list[str]] = {}
        for queue, key in places:
            step, _, entry = key.partition(":")
            streams.setdefault((queue, int(step)), []).append(entry)
        moved: set[tuple[str, str]] = set()
        for (queue, number), entries in streams.items():
            for start in range(0, len(entries), PAGE):
                reply = self._commands.script("adopt", [self._engine.keys.stream(queue, number)], GROUP, old, new,
                                              *entries[start:start + PAGE])
                moved.update((queue, f"{number}:{entry.decode()}") for entry in reply)
        return moved

    def _reclaim(self, holder: str, info: bytes) -> None:
        queues = read_info(info).get("queues", self._engine.consumed())
        held = {queue for queue, _, _ in self._held(queues, holder, 1)}
        for queue in queues:
            self._reclaim_queue(queue, holder, in_company=len(held) > 1)
        self._engine.registry.forget(self._commands, holder)

    def _held(self, queues: Sequence[str], holder: str, page: int) -> list[tuple[str, str, int]]:
        """(queue, id, count) of what a holder has, at most a page of each step."""
        found = []
        for part, keys in self._engine.keys.scopes(queues):
            rows = self._commands.script("held", keys, GROUP, holder, page, *self._engine.steps)
            found += [(part[number - 1], f"{int(step)}:{entry.decode()}", count) for number, step, entry, count
                      in zip(rows[::4], rows[1::4], rows[2::4], rows[3::4], strict=True)]
        return found

    def _reclaim_queue(self, queue: str, holder: str, in_company: bool) -> None:
        engine = self._engine
        moved, buried = 0, list[bytes]()
        engine.queues.learn_options(queue, self._commands)
        while True:
            m, b, left = self._commands.run(engine.queues.reclaim(queue, holder, PAGE, DIED + in_company))
            moved, buried = moved + m, buried + b
            if not left:
                break
        if buried:
            engine.letters.convicted(queue, buried)
        if moved:
            engine.chores.say(logging.WARNING, "worker %s is gone: %d messages of queue %s go to others%s", holder,
                       moved - len(buried), queue, f", {len(buried)} to the dead letters" if buried else "")

    def _reclaim_orphans(self) -> None:
        """Holders that own entries and are in no registry: a reclaimer died between verdict and work, or someone
        removed the registry by hand."""
        engine = self._engine
        queues = engine.consumed()
        places = [engine.keys.stream(queue, step) for queue in queues for step in engine.steps]
        replies = self._commands.many([pack("XINFO", "CONSUMERS", place, GROUP) for place in places])
        # read after the groups: whoever shows there had registered before
        workers = engine.registry.names(self._commands)
        gone: dict[str, set[str]] = {}
        for number, reply in enumerate(replies):
            for row in reply if not isinstance(reply, ReplyError) else ():
                name = text_of(row[row.index(b"name") + 1])
                if name not in workers and name not in (FREE, LAST, ONCE) and name != engine.holder.name:
                    gone.setdefault(name, set()).add(queues[number // len(engine.steps)])
        for name, held in gone.items():
            for queue in held:
                self._reclaim_queue(queue, name, in_company=len(held) > 1)

    # ------------------------------------------------------------------ time
    def _promote(self, now: float) -> None:
        for queue, when in list(self.due.items()):
            if when > now:
                continue
            self.due.pop(queue, None)
            while True:
                moved, wait = self._commands.script("promote", self._engine.keys.whole(queue), 200)
                if moved < 200:
                    break
            if wait >= 0:
                self.due[queue] = time.monotonic() + wait / 1000

    def _expire_dead(self) -> None:
        """A burial does it too, but there may be no other one."""
        keys, oldest = self._engine.keys, int(self._engine.settings.dead_letter_max_age * 1000)
        for queue in self._engine.consumed():
            while self._commands.script("dead_expire", [keys.dead(queue)], oldest, EXPIRE_PAGE) == EXPIRE_PAGE:
                pass

    def _refresh_transient(self, now: float) -> None:
        """For consumers that nobody drives: a loop may be blocked longer than a reply queue lives."""
        for consumer in self._engine.consumers_open():
            if not consumer.closed and now >= consumer.plan.next_refresh + 0.5:
                for reply in self._commands.many(consumer.plan.refresh(now)):
                    self._commands.check(reply)

    # ------------------------------------------------------------------ settlements and lost answers
    def _flush_stale(self, now: float) -> None:
        for consumer in self._engine.consumers_open():
            if len(consumer.outbox) and now - consumer.driven > STALE:
                self.flush(consumer.outbox.take(), consumer)

    def flush(self, batch: list[Settle], consumer: object) -> None:
        self._engine.send_settles(batch, self._commands, consumer)

    def _check_doubts(self, now: float) -> None:
        if now >= self._next_full_check:
            self._next_full_check = now + max(self._engine.settings.visibility_timeout, 10.0)
            for queue in self._holding():
                self._doubts.setdefault(queue, (now - CHECKS[-2], now))
        for queue, (since, check) in list(self._doubts.items()):
            if now >= check:
                self._find_unknown(queue, now)
                later = [since + after for after in CHECKS if since + after > now]
                if later:
                    self._doubts[queue] = since, later[0]
                else:
                    self._doubts.pop(queue, None)

    def _holding(self) -> set[str]:
        """Queues of which the store has something under our names."""
        holder, queues = self._engine.holder, self._engine.consumed()
        return {queue for name in (holder.name, *holder.old_names) for queue, _, _ in self._held(queues, name, 1)}

    def _find_unknown(self, queue: str, now: float) -> None:
        """Entries that the store has under our name and that no consumer here knows, although all of them have read
        their sockets since we first saw that: the answer was lost with a connection. They go back, counted, so that a
        late answer is told from a new one. A consumer whose loop is blocked keeps what waits in its socket."""
        engine = self._engine
        read = min((consumer.driven for consumer in engine.consumers_open()
                    if consumer.waits and queue in consumer.queues), default=now)
        for name in [engine.holder.name, *engine.holder.old_names]:
            back, strays = [], []
            for _, key, count in self._held([queue], name, 1000):
                known = engine.holder.held.get((queue, key))
                if isinstance(known, Delivery):
                    strays.append((queue, key))
                if known is not None and not (isinstance(known, Mark) and known.count):
                    continue
                first = self._unknown.setdefault((queue, key, count), now)
                if read - first >= 0.5 and engine.holder.take_unknown(queue, key, count):
                    back.append(Settle("lost", queue, key, name))
                    self._unknown.pop((queue, key, count), None)
            if name != engine.holder.name:
                # an answer to a request from before the process was declared gone
                self._move(name, engine.holder.name, strays)
            if back:
                engine.chores.say(logging.INFO, "%d messages of queue %s never arrived here: given back", len(back),
                                  queue)
                self.flush(back, None)
        for seen, first in list(self._unknown.items()):
            if now - first > 60:
                self._unknown.pop(seen, None)
        for name, since in list(engine.holder.old_names.items()):
            if now - since > 60:
                engine.holder.old_names.pop(name, None)

    # ------------------------------------------------------------------ end
    def stop(self) -> None:
        self.keeper.stop()
        self._lookout.close()
        self._commands.close()

    def after_fork(self) -> None:
        self.keeper.after_fork()
        self._lookout.abandon()
        self._commands.after_fork()
