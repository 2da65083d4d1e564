"""Leases: kept while the holder lives, over when it is dead."""

from __future__ import annotations

from .kit import LEASE, MARGIN, Engines, bodies, drain, messages, name, until


class TestLease:
    def test_a_living_holder_keeps_what_it_has(self, engines: Engines) -> None:
        queue, mortal, other = name(), engines.mortal(), engines()
        other.publish(queue, messages("running", "prefetched"))
        assert len(mortal.take(queue, 2)) == 2
        waiting = other.consume([queue])
        for _ in range(4):
            engines.advance(LEASE)
            engines.nothing(waiting)
        rows = other.inspector().in_flight(queue)
        assert [(row.holder, row.count) for row in rows] == [(mortal.holder, 1)] * 2

    def test_everything_of_a_dead_holder_comes_back_counted_and_in_order(self, engines: Engines) -> None:
        queue, mortal, other = name(), engines.mortal(), engines()
        other.publish(queue, messages(*"abcdefgh"))
        held = mortal.take(queue, 6)
        mortal.settle("ack", held[1].id)
        mortal.die()
        again = engines.recovered(other.consume([queue]), 7)
        assert sorted(bodies(again)) == list("acdefgh")
        returned = [each for each in again if each.message.body in b"acdef"]
        assert bodies(returned) == list("acdef")
        assert {(each.count, each.redelivered) for each in returned} == {(2, True)}

    def test_nothing_comes_back_twice(self, engines: Engines) -> None:
        queue, mortal, first, second = name(), engines.mortal(), engines(), engines()
        texts = [str(number) for number in range(50)]
        first.publish(queue, messages(*texts))
        assert len(mortal.take(queue, 50)) == 50
        consumers = [first.consume([queue]), second.consume([queue])]
        mortal.die()
        engines.advance(LEASE)
        got = []
        def look() -> bool:
            for consumer in consumers:
                got.extend(consumer.receive(0.05, 7))
            return len(got) >= 50
        until(look, LEASE + MARGIN)
        for consumer in consumers:
            engines.nothing(consumer)
        assert sorted(bodies(got), key=int) == texts

    def test_what_still_runs_when_its_engine_is_closed_comes_back_when_that_seems_dead(self, engines: Engines) -> None:
        queue, leaving, other = name(), engines(), engines()
        other.publish(queue, messages("running", "prefetched"))
        consumer = leaving.consume([queue])
        running = drain(consumer, 2)[0]
        waiting = other.consume([queue])
        leaving.close([running])
        assert [(bodies([each]), each.count) for each in drain(waiting, 1)] == [(["prefetched"], 1)]
        engines.nothing(waiting)
        again, = engines.recovered(waiting, 1)
        assert (again.message.body, again.count, again.redelivered) == (b"running", 2, True)

    def test_the_lease_alone_decides_without_proof_of_death(self, engines: Engines) -> None:
        queue, other = name(), engines(proof_of_death=False, visibility_timeout=3)
        mortal = engines.mortal(proof_of_death=False, visibility_timeout=3)
        other.publish(queue, messages("a"))
        mortal.take(queue, 1)
        mortal.die()
        consumer = other.consume([queue])
        engines.advance(1.5)
        engines.nothing(consumer)
        assert bodies(engines.recovered(consumer, 1, lease=3)) == ["a"]

    def test_the_lease_of_the_holder_counts(self, engines: Engines) -> None:
        queue, other = name(), engines(visibility_timeout=1, proof_of_death=False)
        mortal = engines.mortal(visibility_timeout=4, proof_of_death=False)
        other.publish(queue, messages("a"))
        mortal.take(queue, 1)
        mortal.stop()
        consumer = other.consume([queue])
        engines.advance(2.0)
        engines.nothing(consumer)
        assert bodies(engines.recovered(consumer, 1, lease=4)) == ["a"]

    def test_a_dead_holder_is_forgotten(self, engines: Engines) -> None:
        queue, mortal, other = name(), engines.mortal(), engines()
        other.publish(queue, messages("a"))
        mortal.take(queue, 1)
        holder = mortal.holder
        assert holder in [worker.holder for worker in other.inspector().workers()]
        mortal.die()
        consumer = other.consume([queue])
        assert len(engines.recovered(consumer, 1)) == 1
        until(lambda: holder not in [worker.holder for worker in other.inspector().workers()], LEASE + MARGIN)
        assert other.consumers(queue) == 1

    def test_a_consumer_that_waits_gets_it_by_itself(self, engines: Engines) -> None:
        queue, mortal, other = name(), engines.mortal(), engines()
        other.publish(queue, messages("a"))
        mortal.take(queue, 1)
        consumer = other.consume([queue])
        consumer.receive(0)
        mortal.die()
        engines.advance(LEASE)
        assert bodies(drain(consumer, 1, LEASE + MARGIN)) == ["a"]

    def test_a_process_without_consumers_gives_back_at_its_next_consume(self, engines: Engines) -> None:
        queue, mortal, producer = name(), engines.mortal(), engines()
        producer.publish(queue, messages("a"))
        mortal.take(queue, 1)
        mortal.die()
        engines.advance(LEASE + 0.5)
        assert bodies(engines.recovered(engines().consume([queue]), 1)) == ["a"]


class TestLostLease:
    def test_a_holder_that_wakes_up_late_changes_nothing(self, engines: Engines) -> None:
        queue, mortal, other = name(), engines.mortal(), engines()
        other.publish(queue, messages("nack", "back", "dead"))
        held = mortal.take(queue, 3)
        mortal.stop()
        consumer = other.consume([queue])
        again = engines.recovered(consumer, 3)
        assert sorted(bodies(again)) == ["back", "dead", "nack"]
        mortal.resume()
        mortal.settle("nack", held[0].id)
        mortal.settle("hand_back", held[1].id)
        mortal.settle("dead_letter", held[2].id)
        engines.nothing(consumer)
        stats = other.inspector().stats(queue)
        assert (stats.ready, stats.in_flight, stats.dead) == (0, 3, 0)
        assert {row.count for row in other.inspector().in_flight(queue)} == {2}

    def test_a_frozen_holder_with_room_left_gets_nothing_again(self, engines: Engines) -> None:
        """Its request may still wait in the store."""
        queue, mortal, other = name(), engines.mortal(), engines()
        other.publish(queue, messages("a"))
        assert len(mortal.take(queue, 5)) == 1
        mortal.stop()
        consumer = other.consume([queue])
        assert [(each.message.body, each.count) for each in engines.recovered(consumer, 1)] == [(b"a", 2)]

    def test_a_late_ack_does_no_harm(self, engines: Engines) -> None:
        queue, mortal, other = name(), engines.mortal(), engines()
        other.publish(queue, messages("a"))
        held = mortal.take(queue, 1)
        mortal.stop()
        consumer = other.consume([queue])
        again = engines.recovered(consumer, 1)
        mortal.resume()
        mortal.settle("ack", held[0].id)
        consumer.ack(again[0])
        consumer.receive(0, 0)
        until(lambda: other.inspector().stats(queue).in_flight == 0)
        engines.nothing(consumer)
