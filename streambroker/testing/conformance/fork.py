"""What a forked child may do: nothing with its parent's engine, everything with its own."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable

import pytest

from ...errors import Closed
from .kit import LEASE, Engines, acked, bodies, drain, messages, name, until


def in_child(work: Callable[[], None], timeout: float = 20.0) -> None:
    """Run `work` in a forked child and fail when it raised, crashed or hung."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:  # noqa: BLE001 - a child must not return into the test runner
            traceback.print_exc()
        finally:
            os._exit(code)
    end = time.monotonic() + timeout
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            assert status == 0, "the child failed, see its output"
            return
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise AssertionError("the child hung")
        time.sleep(0.02)


class TestFork:
    def test_the_child_cannot_use_its_parents_consumers(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.publish(queue, messages("a"))
        consumer = engine.consume([queue])
        consumer.receive(0, 0)
        subscription = engine.subscribe()

        def work() -> None:
            for call in (lambda: consumer.receive(0), lambda: consumer.fetch(), lambda: consumer.add("more"),
                         lambda: subscription.receive(0), lambda: subscription.add("topic")):
                with pytest.raises(Closed):
                    call()

        in_child(work)
        assert bodies(drain(consumer, 2, timeout=engines.quiet or 0.01)) == ["a"]

    def test_the_child_settles_nothing(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.publish(queue, messages(*"abcd"))
        consumer = engine.consume([queue])
        first, second, third, fourth = drain(consumer, 4)

        def work() -> None:
            consumer.ack(first)
            consumer.nack(second)
            consumer.hand_back([third])
            consumer.dead_letter(fourth, "why")
            consumer.close()
            engine.close()
            time.sleep(0.2)

        in_child(work)
        other = engines()
        stats = other.inspector().stats(queue)
        assert (stats.ready, stats.in_flight, stats.dead) == (0, 4, 0)
        for _ in range(3):
            engines.advance(LEASE)
            engines.nothing(other.consume([queue]))
        acked(consumer, [first, second, third, fourth])
        until(lambda: other.inspector().stats(queue).in_flight == 0)

    def test_acks_that_were_waiting_are_sent_by_the_parent_once(self, engines: Engines) -> None:
        queue, engine, other = name(), engines(), engines()
        engine.publish(queue, messages("a", "b"))
        consumer = engine.consume([queue])
        for delivery in drain(consumer, 2):
            consumer.ack(delivery)
        in_child(lambda: None)
        consumer.receive(0, 0)
        acked(consumer, [])
        other.publish(queue, messages("c"))
        assert bodies(drain(consumer, 1)) == ["c"]
        assert other.inspector().stats(queue).in_flight == 1

    def test_a_publish_of_the_child_is_refused_or_its_own(self, engines: Engines) -> None:
        """It must not use the parent's connection."""
        queue, engine = name(), engines()
        engine.publish(queue, messages("before"))
        reader, writer = os.pipe()

        def work() -> None:
            try:
                for number in range(20):
                    engine.publish(queue, messages(f"child {number}"))
            except Closed:
                os.write(writer, b"0")
            else:
                os.write(writer, b"20")

        in_child(work)
        stored = int(os.read(reader, 10))
        os.close(reader)
        os.close(writer)
        for number in range(20):
            engine.publish(queue, messages(f"parent {number}"))
        assert engine.ready(queue) == 21 + stored

    def test_the_child_makes_its_own_engine(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        consumer = engine.consume([name()])
        consumer.receive(0)

        def work() -> None:
            own = engines.make()
            own.publish(queue, messages("child"))
            consumer = own.consume([queue])
            got = drain(consumer, 1)
            assert bodies(got) == ["child"]
            acked(consumer, got)
            own.close()

        in_child(work)
        engine.publish(queue, messages("parent"))
        assert bodies(drain(engine.consume([queue]), 1)) == ["parent"]
