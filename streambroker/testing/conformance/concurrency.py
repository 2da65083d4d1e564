"""Many threads and many holders at once: nothing lost, nothing doubled."""

from __future__ import annotations

import random
import threading
from collections import Counter

from ...message import Delivery
from .kit import Engines, messages, name, until


class TestConcurrency:
    def test_every_message_goes_to_one_consumer(self, engines: Engines) -> None:
        queue, producer = name(), engines()
        total, done, lock = 400, Counter[bytes](), threading.Lock()

        def publish(start: int) -> None:
            for number in range(start, start + 100):
                producer.publish(queue, messages(str(number)))

        def consume(seed: int) -> None:
            engine, dice = engines(), random.Random(seed)
            consumer = engine.consume([queue])
            while sum(done.values()) < total:
                for delivery in consumer.receive(0.2, dice.randint(1, 9)):
                    if dice.random() < 0.1:
                        consumer.hand_back([delivery])
                        continue
                    with lock:
                        done[delivery.message.body] += 1
                    consumer.ack(delivery)
            consumer.close()

        threads = [threading.Thread(target=publish, args=(start,)) for start in range(0, total, 100)]
        threads += [threading.Thread(target=consume, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert done == Counter({str(number).encode(): 1 for number in range(total)})
        until(lambda: producer.inspector().stats(queue).in_flight == 0)
        assert producer.ready(queue) == 0

    def test_one_engine_for_all_threads(self, engines: Engines) -> None:
        engine = engines()
        problems: list[BaseException] = []

        def work(number: int) -> None:
            try:
                queue = name(f"thread-{number}")
                consumer = engine.consume([queue])
                for step in range(25):
                    engine.publish(queue, messages(f"{number}.{step}"))
                    got: list[Delivery] = []
                    until(lambda got=got: bool(got.extend(consumer.receive(0.5)) or got))  # type: ignore[misc]
                    assert got[0].message.body == f"{number}.{step}".encode()
                    consumer.ack(got[0])
                consumer.close()
            except BaseException as error:  # noqa: BLE001 - shown below, in the test's own thread
                problems.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert problems == []

    def test_publishing_while_the_engine_is_closed(self, engines: Engines) -> None:
        """What returned is stored, what raised may be."""
        queue, engine, other = name(), engines(), engines()
        stored: list[str] = []

        def publish() -> None:
            try:
                while True:
                    stored.extend(engine.publish(queue, messages(str(len(stored)))))
            except ConnectionError:
                return

        thread = threading.Thread(target=publish)
        thread.start()
        until(lambda: len(stored) > 20)
        engine.close()
        thread.join(10)
        assert not thread.is_alive()
        assert len(stored) <= other.ready(queue) <= len(stored) + 1
