"""The Celery result backend as far as it goes without a server: options, URLs, names, what is kept in memory."""

from __future__ import annotations

import gc
import itertools
import pickle
import subprocess
import sys
from importlib.metadata import entry_points
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import ImproperlyConfigured

from streambroker.celery_results.backend import JetStreamBackend
from streambroker.results.store import ResultStore


def backend_of(url: str, **conf: Any) -> JetStreamBackend:
    app = Celery("test", broker="memory://", backend=url, set_as_current=False)
    app.conf.update(conf)
    backend: JetStreamBackend = app.backend
    return backend


@pytest.mark.parametrize("scheme", ["jetstream", "jetstream-tls"])
def test_celery_finds_the_backend_by_its_scheme(scheme: str) -> None:
    (entry,) = entry_points(group="celery.result_backends", name=scheme)
    assert entry.load() is JetStreamBackend
    backend = backend_of(f"{scheme}://example.org:4300,example.com")
    assert type(backend) is JetStreamBackend
    assert backend.store.address.tls is (scheme == "jetstream-tls")
    assert backend.as_uri() == f"{scheme}://example.org:4300,example.com:4222"


@pytest.mark.parametrize("login", ["user:s3cret", "s3cret", ":s3cret"])
def test_secrets_are_not_shown(login: str) -> None:
    backend = backend_of(f"jetstream://{login}@example.org")
    assert "s3cret" not in f"{backend.as_uri()}{backend.store!r}{backend.store.address!r}"
    assert "s3cret" in backend.as_uri(include_password=True)


@pytest.mark.parametrize(("url", "options", "told"), [
    ("jetstream", {}, "jetstream://host:4222"),
    ("jetstream://example.org/db", {}, "no path"),
    ("jetstream://example.org", {"replicas": 9}, "replicas"),
    ("jetstream://example.org", {"prefix": 1}, "prefix"),
])
def test_what_cannot_be_used_is_refused_at_once(url: str, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ImproperlyConfigured, match=told):
        backend_of(url, result_backend_transport_options=options)


def test_an_unknown_option_is_told(caplog: pytest.LogCaptureFixture) -> None:
    backend_of("jetstream://example.org", result_backend_transport_options={
        "replcas": 3, "retry_policy": {"max_retries": 1}, "user_credentials": "/there"})
    assert "'replcas'" in caplog.text
    assert "did you mean 'replicas'" in caplog.text
    assert "retry_policy" not in caplog.text


@pytest.mark.parametrize(("conf", "expires", "most"), [
    ({}, 86400, 86400),
    ({"result_expires": 60}, 60, 60),
    ({"result_expires": 0.5}, 0.5, 0.5),
    ({"result_expires": 60, "result_chord_expires": 600}, 60, 600),
    ({"result_expires": 60, "result_failure_expires": 7200}, 60, 7200),
    ({"result_expires": None}, 0, 0),
    ({"result_expires": 60, "result_failure_expires": 0}, 60, 0),
])
def test_how_long_results_live(conf: dict[str, Any], expires: float, most: float) -> None:
    store = backend_of("jetstream://example.org", **conf).store
    assert (store.expires, store.stream.max_age) == (expires, most)


def test_one_process_has_one_store_for_a_place() -> None:
    one, two = backend_of("jetstream://one.example"), backend_of("jetstream://one.example")
    other = backend_of("jetstream://one.example", result_backend_transport_options={"prefix": "other"})
    assert one.store is two.store
    assert other.store is not one.store


def test_threads_share_a_backend() -> None:
    app = Celery("test", broker="memory://", backend="jetstream://example.org", set_as_current=False)
    assert app.backend.thread_safe
    assert app.backend is app.backend


def test_the_retry_policy_is_the_users() -> None:
    backend = backend_of("jetstream://example.org", result_backend_transport_options={
        "retry_policy": {"max_retries": 3}})
    assert backend.retry_policy["max_retries"] == 3
    assert backend.retry_policy["interval_max"] == 1


def test_a_copy_has_the_same_place() -> None:
    backend = backend_of("jetstream://example.org", result_expires=60)
    backend.app.set_current()
    copy = pickle.loads(pickle.dumps(backend))
    assert copy.as_uri() == backend.as_uri()
    assert copy.expires == 60


def test_names_never_meet() -> None:
    store = ResultStore("jetstream://example.org", prefix="p")
    names = ["a", "A", "a.b", "a..b", "a b", "ä", "a*", "a>", "=", "", "a=2E", "x" * 500, "x" * 501]
    subjects = [store.stream.value(name) for name in names]
    subjects += [store.stream.member(one, two) for one, two in itertools.product(names, repeat=2)]
    subjects += [store.stream.news(name) for name in names]
    assert len(set(subjects)) == len(subjects)
    assert all(subject.isascii() and " " not in subject for subject in subjects)


def test_nobody_is_kept_who_waits_no_more() -> None:
    """Results of groups that nobody asks for, and of a get() that timed out."""
    backend = backend_of("jetstream://example.org")
    for number in range(10):
        result = backend.app.AsyncResult(f"task{number}")
        result.then(lambda result: None)
    del result
    gc.collect()
    assert not any(len(waiters) if hasattr(waiters, "__len__") else 1
                   for table in backend._pending_results for waiters in list(table.values()))


@pytest.mark.parametrize(("module", "walled_off"), [
    ("streambroker.results", {"redis", "nats", "kombu", "celery", "dramatiq"}),
    ("streambroker.results.store", {"redis", "kombu", "celery", "dramatiq"}),
    ("streambroker.celery_results.backend", {"dramatiq", "valkey"}),
])
def test_an_import_brings_nothing_foreign(module: str, walled_off: set[str]) -> None:
    program = f"import sys, {module}; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert walled_off.isdisjoint(done.stdout.split())
