"""Options of the Dramatiq brokers, and what importing them brings along."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from typing import Any

import pytest
import redis

from streambroker.dramatiq import JetStreamBroker, RedisStreamsBroker
from streambroker.dramatiq.options import engine_options
from streambroker.errors import ConfigurationError
from streambroker.settings import JetStreamSettings, Settings


def options(**given: Any) -> dict[str, Any]:
    return engine_options(given, Settings, None)


class TestUnits:
    def test_milliseconds_become_seconds(self) -> None:
        assert options(visibility_timeout=15_000, publish_timeout=2_500, prefix="p") == {
            "visibility_timeout": 15.0, "publish_timeout": 2.5, "prefix": "p"}

    def test_the_connections_options_stay_seconds(self) -> None:
        assert options(socket_timeout=3, socket_connect_timeout=1.5) == {
            "socket_timeout": 3, "socket_connect_timeout": 1.5}

    def test_of_jetstream_too(self) -> None:
        assert engine_options({"duplicate_window": 60_000}, JetStreamSettings, None) == {"duplicate_window": 60.0}

    @pytest.mark.parametrize("value", [30, 86_400_001, float("nan"), True, "soon", -1])
    def test_what_cannot_be_used(self, value: Any) -> None:
        with pytest.raises(ConfigurationError, match="visibility_timeout"):
            RedisStreamsBroker(visibility_timeout=value)

    def test_seconds_given_for_milliseconds_are_told(self) -> None:
        with pytest.raises(ConfigurationError, match=r"1000 to 8.64e\+07 ms"):
            options(visibility_timeout=30)


class TestStockNames:
    def test_they_have_their_nearest_meaning_and_say_so(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, "streambroker.dramatiq"):
            found = options(namespace="shop", heartbeat_timeout=60_000, dead_message_ttl=3_600_000,
                            maintenance_chance=1000)
        assert found == {"prefix": "shop", "visibility_timeout": 60.0, "dead_letter_max_age": 3600.0}
        told = " ".join(record.getMessage() for record in caplog.records)
        for name in ("namespace", "heartbeat_timeout", "dead_message_ttl", "maintenance_chance"):
            assert name in told

    def test_not_both(self) -> None:
        with pytest.raises(ConfigurationError, match="mean the same"):
            options(heartbeat_timeout=60_000, visibility_timeout=60_000)

    def test_the_variable_for_dead_letters(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("dramatiq_dead_message_ttl", "60000")
        assert options() == {"dead_letter_max_age": 60.0}
        assert options(dead_message_ttl=5000) == {"dead_letter_max_age": 5.0}

    @pytest.mark.parametrize("name", ["priority_steps", "priority_order"])
    def test_priorities_have_one_name(self, name: str) -> None:
        with pytest.raises(ConfigurationError, match="max_priority"):
            options(**{name: (0, 1)})

    def test_a_typing_error(self) -> None:
        with pytest.raises(ConfigurationError, match="did you mean visibility_timeout"):
            RedisStreamsBroker(visibility_timout=30_000)


class TestPlaces:
    def test_making_one_and_declaring_queues_does_nothing_on_the_network(self) -> None:
        before = threading.active_count()
        for broker in (RedisStreamsBroker(url="redis://127.0.0.1:1/0"), JetStreamBroker(url="nats://127.0.0.1:1")):
            broker.declare_queue("default")
            broker.close()
            broker.close()
        assert threading.active_count() == before

    @pytest.mark.parametrize("given", [
        {}, {"url": "redis://localhost:6379/0"}, {"host": "localhost", "port": 6379, "db": 0},
        {"client": redis.Redis()}])
    def test_forms_of_a_redis(self, given: dict[str, Any]) -> None:
        assert "redis://localhost:6379/0" in repr(RedisStreamsBroker(**given).engine)

    @pytest.mark.parametrize("url", [
        "rediss://h:1/2", "valkey://h", "unix:///run/redis.sock", "redis-streams://h"])
    def test_other_schemes(self, url: str) -> None:
        RedisStreamsBroker(url=url)

    def test_servers_of_a_cluster(self) -> None:
        assert "two:4222" in repr(JetStreamBroker(url="nats://one:4222", servers=["nats://two:4222"]).engine)

    @pytest.mark.parametrize(("kind", "url"), [
        (RedisStreamsBroker, "nats://h"), (JetStreamBroker, "redis://h"), (RedisStreamsBroker, "amqp://h"),
        (JetStreamBroker, "localhost")])
    def test_the_other_store(self, kind: type[RedisStreamsBroker], url: str) -> None:
        with pytest.raises(ConfigurationError, match=f"{kind.__name__} takes a URL"):
            kind(url=url)

    def test_the_password_is_never_shown(self) -> None:
        broker = RedisStreamsBroker(url="redis://:secret@127.0.0.1:1/0", publish_timeout=100)
        assert "secret" not in repr(broker.engine)


@pytest.mark.parametrize(("kind", "foreign"), [
    ("RedisStreamsBroker", ["nats", "kombu", "celery"]), ("JetStreamBroker", ["redis", "kombu", "celery"])])
def test_one_pair_needs_no_other_package(kind: str, foreign: list[str]) -> None:
    program = (f"import sys\nfor name in {foreign!r}: sys.modules[name] = None\n"
               f"from streambroker.dramatiq import {kind}\nbroker = {kind}()\nbroker.declare_queue('q')\n"
               "broker.close()\n")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
