"""Operations of an engine, each in a process of its own, to be killed between two of its steps.

    python -m integration.operations NAME URL OPTIONS

That process gets ready, says so, does its operation at a line of its input, and says when it is done; then it waits to
be killed.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any, ClassVar

from streambroker import connect
from streambroker.engine import Consumer, Engine
from streambroker.message import Delivery, Message, QueueSpec
from streambroker.testing.conformance.kit import drain, messages, until

QUEUE = "q"
OTHER = "other"
BODIES = ("a", "b")


class Operation:
    """`before` brings the store to where the operation starts, `ready` the process, `act` is what is killed. Each
    message of BODIES may afterwards be there so often as `copies` says, and so often as `done` says when the operation
    has got to its end: in the queue, waiting, or in the dead letters."""

    copies: ClassVar[tuple[int, ...]] = (1,)
    done: ClassVar[tuple[int, ...]] = (1,)
    #: how often each may have been delivered in the end
    deliveries: ClassVar[int] = 2
    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def before(self) -> None:
        self.engine.declare(QueueSpec(QUEUE))
        self.engine.publish(QUEUE, messages(*BODIES))

    def ready(self) -> None:
        pass

    def act(self) -> None:
        raise NotImplementedError

    def repeat(self) -> None:
        """What somebody does who sees that it was broken off; by another process."""


class Held(Operation):
    """By a process that has the messages."""

    consumer: Consumer
    held: Sequence[Delivery]

    def ready(self) -> None:
        self.consumer = self.engine.consume([QUEUE])
        self.held = drain(self.consumer, len(BODIES))
        assert len(self.held) == len(BODIES)

    def flush(self) -> None:
        """Send what was settled, and wait until the store has it."""
        for _ in range(5):
            self.consumer.receive(0, 0)
            time.sleep(0.05)

    def kill(self, reason: str = "of no use") -> None:
        for delivery in self.held:
            self.consumer.dead_letter(delivery, reason)
        self.flush()


class Publish(Operation):
    copies = (0, 1)

    def before(self) -> None:
        self.engine.declare(QueueSpec(QUEUE))

    def act(self) -> None:
        for message in messages(*BODIES):
            self.engine.publish(QUEUE, [message])


class PublishToNew(Publish):
    """To a queue that nobody has declared."""

    def before(self) -> None:
        pass


class PublishBatch(Publish):
    def act(self) -> None:
        self.engine.publish(QUEUE, messages(*BODIES))


class PublishDelayed(Publish):
    def act(self) -> None:
        for message in messages(*BODIES, delay=0.5):
            self.engine.publish(QUEUE, [message])


class Take(Operation):
    def act(self) -> None:
        consumer = self.engine.consume([QUEUE])
        assert len(drain(consumer, len(BODIES))) == len(BODIES)


class TakeDue(Take):
    """What waits for its time gets there, and is taken."""

    def before(self) -> None:
        self.engine.declare(QueueSpec(QUEUE))
        self.engine.publish(QUEUE, messages(*BODIES, delay=1.5))


class TakeWhatAnotherHeld(Take):
    """Its holder has let its lease run out."""

    deliveries = 3

    def before(self) -> None:
        super().before()
        self.engine.close(keep=drain(self.engine.consume([QUEUE]), len(BODIES)))


class Forget(Operation):
    """Without acknowledgements a message is gone when it is taken."""

    copies = (0, 1)
    done = (0,)

    def act(self) -> None:
        consumer = self.engine.consume([QUEUE], no_ack=True)
        assert len(drain(consumer, len(BODIES))) == len(BODIES)
        for _ in range(5):
            consumer.receive(0, 0)
            time.sleep(0.05)


class Ack(Held):
    copies = (0, 1)
    done = (0,)

    def act(self) -> None:
        for delivery in self.held:
            self.consumer.ack(delivery)
        self.flush()


class AckNow(Ack):
    def act(self) -> None:
        for delivery in self.held:
            self.consumer.ack_now(delivery)


class Nack(Held):
    def act(self) -> None:
        for delivery in self.held:
            self.consumer.nack(delivery)
        self.flush()


class NackLater(Held):
    def act(self) -> None:
        for delivery in self.held:
            self.consumer.nack(delivery, 0.5)
        self.flush()


class NackAtTheLimit(Nack):
    """The last delivery: it becomes a dead letter."""

    options: ClassVar[dict[str, Any]] = {"delivery_limit": 1}


class HandBack(Held):
    def act(self) -> None:
        self.consumer.hand_back(self.held)
        self.flush()


class Stop(Held):
    def act(self) -> None:
        self.engine.close()


class Bury(Held):
    def act(self) -> None:
        self.kill()


class BuryChanged(Held):
    """With what Dramatiq has written into it meanwhile."""

    def act(self) -> None:
        for delivery in self.held:
            self.consumer.dead_letter(delivery, "failed", Message(delivery.message.body, b'{"retries": 3}'))
        self.flush()


class Graves(Operation):
    """There are dead letters."""

    def before(self) -> None:
        super().before()
        held = Held(self.engine)
        held.ready()
        held.kill()
        until(lambda: self.engine.inspector().stats(QUEUE).dead == len(BODIES))

    def graves(self) -> list[str]:
        return [letter.id for letter in self.engine.inspector().dead(QUEUE)]


class Replay(Graves):
    def act(self) -> None:
        assert self.engine.inspector().replay(QUEUE, self.graves()) == len(BODIES)

    def repeat(self) -> None:
        """JetStream cannot move a message from stream to stream in one step; it knows what it has stored."""
        self.engine.inspector().replay(QUEUE, self.graves())


class RemoveDead(Graves):
    copies = (0, 1)
    done = (0,)

    def act(self) -> None:
        assert self.engine.inspector().dead_remove(QUEUE, self.graves()) == len(BODIES)


class Forward(Graves):
    """Dead letters go to another queue (x-dead-letter-exchange); what was sent there is sent again when nobody knows
    whether it was."""

    copies = (1, 2)

    def act(self) -> None:
        self.engine.forward_dead_letters(QUEUE, lambda letter: bool(self.engine.publish(OTHER, [letter.message])))
        consumer = self.engine.consume([QUEUE])
        deadline = time.monotonic() + 15
        while self.engine.inspector().stats(QUEUE).dead:
            assert time.monotonic() < deadline
            consumer.receive(0.1)


class Waiting(Operation):
    def before(self) -> None:
        self.engine.declare(QueueSpec(QUEUE))
        self.engine.publish(QUEUE, [Message(body.encode(), id=body, delay=6.0) for body in BODIES])


class Revoke(Waiting):
    copies = (0, 1)
    done = (0,)

    def act(self) -> None:
        assert self.engine.inspector().drop(BODIES) == len(BODIES)


class RemoveDelayed(Revoke):
    def act(self) -> None:
        ids = [row.id for row in self.engine.inspector().delayed(QUEUE)]
        assert self.engine.inspector().delayed_remove(QUEUE, ids) == len(BODIES)


class Purge(Operation):
    copies = (0, 1)
    done = (0,)

    def before(self) -> None:
        super().before()
        self.engine.publish(QUEUE, messages("waits", delay=4))

    def act(self) -> None:
        assert self.engine.inspector().purge(QUEUE) == len(BODIES) + 1


class Delete(Purge):
    def act(self) -> None:
        assert self.engine.delete(QUEUE) == len(BODIES) + 1


OPERATIONS: dict[str, type[Operation]] = {kind.__name__: kind for kind in (
    Publish, PublishToNew, PublishBatch, PublishDelayed, Take, TakeDue, TakeWhatAnotherHeld, Forget, Ack, AckNow, Nack,
    NackLater, NackAtTheLimit, HandBack, Stop, Bury, BuryChanged, Replay, RemoveDead, Forward, Revoke, RemoveDelayed,
    Purge, Delete)}


def say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def main(name: str, url: str, options: str) -> None:
    operation = OPERATIONS[name](connect(url, **json.loads(options)))
    operation.ready()
    say("ready")
    sys.stdin.readline()
    operation.act()
    say("done")
    sys.stdin.readline()


if __name__ == "__main__":
    main(*sys.argv[1:])
