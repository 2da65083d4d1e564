"""Dramatiq's command on a server of each store: kills, stops, reloads, forks, gevent."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dramatiq
import pytest

from integration.dramatiq_worker import DramatiqCommand, DramatiqRig
from integration.ledger import Ledger
from integration.stores import Server
from streambroker.dramatiq import JetStreamBroker
from streambroker.testing.servers import wait_until
from tests.dramatiq_rig import message, take, until, working

pytestmark = pytest.mark.stores

Start = Callable[..., DramatiqRig]


@pytest.fixture
def start(server: Server, tmp_path: Path, ledger: Ledger, prefix: str) -> Iterator[Start]:
    """`start(**options of the broker)` makes this test's rig."""
    rigs: list[DramatiqRig] = []

    def start(**options: Any) -> DramatiqRig:
        rigs.append(DramatiqRig(server, tmp_path, ledger, prefix, **options))
        return rigs[-1]

    yield start
    for rig in rigs:
        rig.close()


def jobs(count: int, name: str = "job") -> list[str]:
    return [f"{name}-{number}" for number in range(count)]


class TestKilled:
    @pytest.mark.usefixtures("at_base")
    def test_what_it_had_runs_elsewhere_within_five_seconds_by_default(self, start: Start) -> None:
        rig = start()
        names = jobs(4)
        doomed = rig.command()
        for name in names:
            rig.send("hold", name)
        wait_until(lambda: len(rig.ledger.ids("start")) >= 2, 20, "two of them run")
        survivor = rig.command(threads=4)
        # the store has heard who holds what
        time.sleep(1.5)
        doomed.kill()
        killed = time.time()
        rig.flag("release")
        rig.wait("end", *names, seconds=10)
        assert max(line.at for line in rig.ledger.lines("end")) - killed < 5
        rig.finish()
        survivor.stop()

    def test_after_the_lease_without_proof(self, start: Start) -> None:
        rig = start(visibility_timeout=3000, proof_of_death=False)
        doomed = rig.command()
        rig.send("hold", "a")
        rig.wait("start", "a")
        rig.command()
        doomed.kill()
        killed = time.time()
        rig.flag("release")
        rig.wait("end", "a", seconds=10)
        assert 1 < rig.ledger.lines("end")[0].at - killed < 8

    def test_a_job_that_kills_its_process_is_given_up_and_told(self, start: Start) -> None:
        rig = start(delivery_limit=2)
        rig.command()
        rig.broker.enqueue(message("poison", actor="kills", retries=3, traceback="of the third try"))
        for name in jobs(3):
            rig.send("work", name)
        for died in (1, 2):
            wait_until(lambda died=died: rig.count("start", "poison") == died, 30, f"death {died}")
            rig.command()
        rig.wait("end", *jobs(3))
        rig.wait("nack", "poison", seconds=30)
        assert rig.broker.get_queue_message_counts("default") == (0, 0, 1)
        letter, = rig.broker.engine.inspector().dead("default")
        assert (letter.count, letter.reason) == (2, "delivery limit of 2 reached: its worker died")
        assert [(line.id, line.facts["error"]) for line in rig.ledger.lines("nack")] == [
            ("poison", "DeliveryLimitExceeded")]
        assert json.loads(letter.message.body)["options"] == {"retries": 3, "traceback": "of the third try"}
        assert letter.holder and letter.first < letter.last
        rig.broker.engine.inspector().replay("default", [letter.id])
        wait_until(lambda: rig.count("start", "poison") == 3, 10, "it runs again")
        assert [line.facts["retries"] for line in rig.ledger.starts("poison")] == [3, 3, 0]
        wait_until(lambda: rig.broker.get_queue_message_counts("default")[2] == 0, 5, "it is a message again")


def answers(rig: DramatiqRig, command: DramatiqCommand) -> bool:
    """A process on a nats-server that answers has read what others had told it before."""
    return isinstance(rig.broker, JetStreamBroker) and any(
        worker.pid in command.pids() and worker.seen < 1 for worker in rig.broker.engine.inspector().workers())


class TestAlive:
    def test_busy_stopping_and_paused_ones_keep_what_they_have_for_ten_leases(self, start: Start) -> None:
        rig = start(visibility_timeout=1000)
        stopping = rig.command(threads=1)
        rig.send("hold", "waited-for")
        rig.wait("start", "waited-for")
        stopping.signal(signal.SIGTERM)
        rig.command()
        for name in jobs(4):
            rig.send("spin", name)
        wait_until(lambda: len(rig.ledger.ids("start")) == 3, 10, "both threads are busy")
        wait_until(lambda: rig.broker.engine.inspector().stats("default").in_flight == 5, 10, "two are prefetched")
        running, release = threading.Event(), threading.Event()

        @dramatiq.actor(broker=rig.broker, queue_name="paused")
        def held() -> None:
            running.set()
            release.wait(60)

        held.send()
        with working(rig.broker, queues={"paused"}) as worker:
            assert running.wait(10)
            for thread in worker.consumers.values():
                thread.pause()
            free = rig.command(threads=8)
            others = rig.another().consume("paused", timeout=10_000)
            assert next(others) is None
            assert len(rig.ledger.lines("start")) == 3
            rig.flag("release")
            release.set()
            rig.wait("end", "waited-for", *jobs(4))
            rig.broker.join("paused", timeout=5000)
            worker.resume()
        rig.finish()
        assert len(rig.ledger.lines("start")) == 5
        assert free.alive
        wait_until(lambda: not stopping.alive, 10, "the stopping one ends")

    def test_a_frozen_process_is_left_to_its_lease(self, start: Start) -> None:
        rig = start(visibility_timeout=3000)
        frozen = rig.command(threads=1)
        rig.send("hold", "a")
        # Dramatiq before 2.2 starts what it has prefetched in any order
        rig.wait("start", "a")
        rig.send("work", "b")
        wait_until(lambda: rig.broker.engine.inspector().stats("default").in_flight == 2, 10, "it has both")
        for pid in frozen.pids():
            os.kill(pid, signal.SIGSTOP)
        rig.command(threads=2)
        wait_until(lambda: rig.count("start", "a") == 2, 12, "another has it after the lease")
        rig.wait("end", "b")
        for pid in frozen.pids():
            os.kill(pid, signal.SIGCONT)
        wait_until(lambda: "taken for gone" in frozen.log.read_text() or answers(rig, frozen), 10, "it knows")
        rig.flag("release")
        # what it had begun is over twice, what waited in it is not started
        wait_until(lambda: rig.count("end", "a") == 2, 10, "both end")
        wait_until(lambda: "was skipped" in frozen.log.read_text(), 10, "it leaves the other one alone")
        rig.finish(10)
        assert rig.count("start", "b") == 1


class TestStopped:
    def test_unstarted_ones_are_with_others_at_once_and_uncounted(self, start: Start) -> None:
        rig = start()
        leaving = rig.command(threads=2)
        names = jobs(6)
        for name in names:
            rig.send("hold", name)
        wait_until(lambda: len(rig.ledger.ids("start")) == 2, 10, "both threads are busy")
        consumer = rig.broker.consume("default", prefetch=10, timeout=100)
        assert len(take(consumer, 2, 3)) == 2
        leaving.signal(signal.SIGTERM)
        wait_until(lambda: "Shutting down" in leaving.log.read_text(), 10, "its threads start nothing more")
        rig.flag("release")
        got = take(consumer, 2, 6)
        assert {each.args[0] for each in got} == {*names[:4]} - {*rig.ledger.ids("start")}
        assert {each.delivery_count for each in got} == {1}
        consumer.requeue(got)

    def test_what_still_runs_after_the_patience_is_not_handed_back(self, start: Start) -> None:
        rig = start()
        leaving = rig.command("--worker-shutdown-timeout", "500", threads=1)
        rig.send("hold", "a")
        rig.wait("start", "a")
        consumer = rig.broker.consume("default", prefetch=10, timeout=100)
        leaving.stop()
        got, = take(consumer, 1, 36)
        assert (got.args[0], got.delivery_count, got.redelivered) == ("a", 2, True)
        consumer.ack(got)

    def test_reload_on_hup_loses_nothing(self, start: Start) -> None:
        rig = start()
        command = rig.command(processes=2)
        for number in range(40):
            rig.send("work", f"j{number}", 0.05)
            if number == 15:
                command.signal(signal.SIGHUP)
        rig.wait("end", *(f"j{number}" for number in range(40)), seconds=40)
        rig.finish()
        assert len(rig.ledger.lines("start")) == 40


class TestWays:
    @pytest.mark.parametrize("options", [(), ("--use-spawn",)])
    def test_processes(self, start: Start, options: tuple[str, ...]) -> None:
        rig = start()
        rig.command(*options, processes=2)
        rig.send("work", "a")
        rig.send("spawns", "b")
        rig.send("awaits", "c")
        rig.send("work", "later", delay=300)
        rig.wait("end", "a", "b", "b/child", "c", "later")
        rig.finish()

    def test_gevent(self, start: Start) -> None:
        rig = start(visibility_timeout=2000)
        command = rig.command(script="dramatiq-gevent", threads=8)
        for name in jobs(8):
            rig.send("hold", name)
        rig.send("spawns", "b")
        rig.wait("start", *jobs(8))
        time.sleep(3)
        rig.flag("release")
        rig.wait("end", *jobs(8), "b", "b/child")
        rig.send("awaits", "c")
        rig.send("work", "later", delay=300)
        rig.wait("end", "c", "later")
        rig.finish()
        assert len(rig.ledger.lines("start")) == 12
        command.stop()

    def test_fork_function(self, start: Start) -> None:
        rig = start()
        command = rig.command("--fork-function", "integration.apps.dramatiq_app:fork_function")
        rig.wait("end", "forked")
        command.stop()


def test_a_forked_child_and_its_parent_both_go_on(start: Start) -> None:
    rig = start()
    rig.send("nobody", "before")
    consumer = rig.broker.consume("default", prefetch=9, timeout=100)
    held, = take(consumer, 1)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            consumer.ack(held)
            rig.broker.enqueue(message("child"))
            code = 0
        finally:
            os._exit(code)
    until(lambda: os.waitpid(child, os.WNOHANG)[0] == child, 20)
    rig.broker.enqueue(message("parent"))
    assert sorted(each.args[0] for each in take(consumer, 2)) == ["child", "parent"]
    other = rig.broker.engine.inspector().stats("default")
    assert other.in_flight == 3


def test_a_restart_of_the_worker_keeps_delays_exact(start: Start) -> None:
    rig = start()
    sent = time.time()
    command = rig.command()
    rig.send("work", "later", delay=10_000)
    due = time.time() + 10
    command.kill()
    rig.command()
    rig.send("work", "ready")
    rig.wait("end", "ready", "later")
    rig.finish()
    ready, later = (rig.ledger.starts(job)[0].at for job in ("ready", "later"))
    assert sent + 9.95 < later < max(due, ready) + 0.5
