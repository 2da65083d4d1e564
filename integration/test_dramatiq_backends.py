"""Results and rate limits of Dramatiq on a nats-server: what its own tests leave open."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import dramatiq
import pytest
from dramatiq.rate_limits import Barrier, ConcurrentRateLimiter
from dramatiq.results import ResultFailure, ResultMissing, Results, ResultTimeout

from streambroker.dramatiq import rate_limits, results
from streambroker.testing.faults import Proxy
from streambroker.testing.natsserver import NatsServer
from tests.dramatiq_rig import MemoryBroker, message, until, working

pytestmark = pytest.mark.only_on("nats", "is about the backends on JetStream")

Open = Callable[..., Any]


@pytest.fixture
def open_backend(server: NatsServer, prefix: str) -> Iterator[Open]:
    """`open_backend(module, port)` with this test's prefix."""
    made: list[Any] = []

    def start(module: Any, port: int = server.port) -> Any:
        made.append(module.JetStreamBackend(url=f"nats://127.0.0.1:{port}", prefix=prefix))
        return made[-1]

    yield start
    for backend in made:
        backend.store.close()


def in_threads(count: int, work: Callable[[int], object]) -> None:
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)


class TestResults:
    def test_early_and_late_ones_are_served_beside_another_broker(self, open_backend: Open) -> None:
        broker = MemoryBroker(url=f"memory://{os.urandom(4).hex()}")
        backend = open_backend(results)
        broker.add_middleware(Results(backend=backend))

        @dramatiq.actor(broker=broker, store_results=True, max_retries=0, throws=ValueError)
        def work(number: int) -> int:
            if number < 0:
                raise ValueError("below nothing")
            return number * 2

        sent = [work.send(number) for number in range(20)]
        failed, got = work.send(-1), {}
        with pytest.raises(ResultMissing):
            sent[0].get_result(backend=backend)
        with working(broker):
            in_threads(20, lambda number: got.update({number: backend.get_result(sent[number], block=True)}))
            assert got == {number: number * 2 for number in range(20)}
            with pytest.raises(ResultFailure, match="below nothing"):
                failed.get_result(backend=backend, block=True)
            assert sent[3].get_result(backend=backend, block=True, timeout=1) == 6
            assert sent[3].get_result(backend=backend) == 6
        broker.close()

    def test_a_wait_ends_in_its_time(self, open_backend: Open) -> None:
        start = time.monotonic()
        with pytest.raises(ResultTimeout):
            open_backend(results).get_result(message(1), block=True, timeout=300)
        assert 0.25 < time.monotonic() - start < 2

    def test_one_that_is_too_large_is_told(self, open_backend: Open) -> None:
        backend, sent = open_backend(results), message(1)
        backend.store_result(sent, "fits", 60_000)
        most = backend.store.link.max_payload
        with pytest.raises(ValueError, match=str(most)):
            backend.store_result(sent, "x" * most, 60_000)
        with pytest.raises(ResultFailure, match=str(most)):
            backend.get_result(sent)

    def test_each_lives_for_its_time(self, open_backend: Open, server: NatsServer) -> None:
        backend, short, long = open_backend(results), message(1), message(2)
        backend.store_result(short, 1, 1000)
        backend.store_result(long, 2, 3_600_000)
        config = server.api(f"STREAM.INFO.{backend.store.stream.name}")["config"]
        assert config["max_age"] == 3600 * 10**9
        until(lambda: backend.store.get(backend.build_message_key(short)) is None, 6)
        assert backend.get_result(long) == 2

    def test_whoever_waits_gets_over_a_link_that_breaks(self, open_backend: Open, proxy: Proxy) -> None:
        backend, sent, got = open_backend(results, proxy.port), message(1), []
        backend.store_result(message(2), 0, 60_000)
        waiter = threading.Thread(target=lambda: got.append(backend.get_result(sent, block=True, timeout=20_000)))
        waiter.start()
        proxy.refuse()
        proxy.drop()
        with pytest.raises(ResultTimeout):
            backend.get_result(sent, block=True, timeout=300)
        open_backend(results).store_result(sent, "meanwhile", 60_000)
        proxy.refuse(on=False)
        waiter.join(20)
        assert got == ["meanwhile"]

    def test_parent_and_child_of_a_fork_go_on(self, open_backend: Open) -> None:
        backend, sent = open_backend(results), message(1)
        backend.store_result(message(2), 0, 60_000)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                backend.store_result(sent, "the child's", 60_000)
                code = 0
            finally:
                os._exit(code)
        assert backend.get_result(sent, block=True, timeout=20_000) == "the child's"
        assert os.waitpid(child, 0)[1] == 0


class TestRateLimits:
    def test_many_at_once_never_exceed(self, open_backend: Open) -> None:
        backend, done = open_backend(rate_limits), []
        in_threads(16, lambda number: done.append(backend.incr("counter", 1, 10, 60_000)))
        assert sorted(done) == [False] * 6 + [True] * 10
        assert not backend.incr("counter", 1, 10, 60_000)
        in_threads(16, lambda number: done.append(backend.decr("counter", 1, 0, 60_000)))
        assert done[16:].count(True) == 10
        assert not backend.decr("never seen", 1, 0, 60_000)

    def test_a_sum_is_never_exceeded(self, open_backend: Open) -> None:
        backend, names, done = open_backend(rate_limits), ["a", "b", "c"], []
        in_threads(12, lambda number: done.append(
            backend.incr_and_sum(names[number % 3], lambda: names, 1, 5, 60_000)))
        # those who come in one moment may refuse each other; alone nobody is refused what there is room for
        while backend.incr_and_sum("a", lambda: names, 1, 5, 60_000):
            done.append(True)
        assert done.count(True) == 5

    def test_a_key_is_forgotten_in_its_time(self, open_backend: Open) -> None:
        backend = open_backend(rate_limits)
        assert backend.add("key", 1, 300)
        assert not backend.add("key", 1, 300)
        time.sleep(0.35)
        assert backend.add("key", 1, 60_000)

    def test_a_mutex_between_processes(self, open_backend: Open) -> None:
        first, second = (ConcurrentRateLimiter(open_backend(rate_limits), "mutex") for _ in range(2))
        with first.acquire(), second.acquire(raise_on_failure=False) as acquired:
            assert not acquired
        with second.acquire() as acquired:
            assert acquired

    def test_a_barrier_wakes_all_and_lets_late_ones_pass(self, open_backend: Open) -> None:
        barrier, woken = Barrier(open_backend(rate_limits), "barrier", ttl=60_000), []
        assert barrier.create(parties=4)
        waiters = threading.Thread(target=in_threads, args=(3, lambda number: woken.append(
            (barrier.wait(timeout=20_000), time.monotonic()))))
        waiters.start()
        until(lambda: not barrier.backend.decr("barrier", 0, 2, 60_000))  # one of the four is missing
        last = Barrier(open_backend(rate_limits), "barrier", ttl=60_000)
        opened = time.monotonic()
        assert last.wait()
        waiters.join(20)
        assert [passed for passed, _ in woken] == [True] * 3
        assert max(at for _, at in woken) - opened < 1
        assert last.backend.wait("barrier@events", 1000)
        assert not last.backend.wait("other@events", 100)
