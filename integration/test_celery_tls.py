"""`rediss-streams://`: encrypted, and verified unless told otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kombu.exceptions import OperationalError

from streambroker.testing.tls import Authority, TlsFront


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def front(server, authority) -> Iterator[TlsFront]:
    with TlsFront(server.port, authority) as front:
        yield front


def test_jobs_run_over_tls(server, at_base, celery, ledger, front, authority):
    url = server.url("rediss-streams", port=front.port)
    celery.use(url, conf={"broker_use_ssl": {"ssl_ca_certs": str(authority.ca_file)}})
    worker = celery.worker()
    celery.send("work", "now")
    celery.send("work", "later", countdown=1)
    assert celery.app.control.ping(timeout=3)
    ledger.wait("end", 2, timeout=15)
    worker.stop()
    assert ledger.verdict().clean


def test_a_server_may_ask_for_a_certificate(server, celery, authority):
    with TlsFront(server.port, authority, ask_client=True) as front:
        celery.use(server.url("rediss-streams", port=front.port), ssl_ca_certs=str(authority.ca_file),
                   ssl_certfile=str(authority.client_file), ssl_keyfile=str(authority.client_file))
        celery.send("work", "stored")
        celery.use(server.url("rediss-streams", port=front.port), ssl_ca_certs=str(authority.ca_file))
        refused(celery)


def test_an_unknown_authority_is_refused(server, celery, front):
    celery.use(server.url("rediss-streams", port=front.port, password="hidden"))
    refused(celery)
    celery.use(server.url("rediss-streams", port=front.port), ssl_cert_reqs="none")
    celery.send("work", "stored")


def test_a_certificate_of_another_host_is_refused(server, celery, authority):
    with TlsFront(server.port, authority, name="other.example") as front:
        celery.use(server.url("rediss-streams", port=front.port), ssl_ca_certs=str(authority.ca_file))
        refused(celery)


def test_a_plain_server_is_refused(server, celery):
    celery.use(server.url("rediss-streams"))
    refused(celery)


def refused(celery) -> None:
    with pytest.raises(OperationalError) as caught:
        celery.app.tasks["work"].apply_async(("refused",), retry=False)
    assert "hidden" not in str(caught.value)
