"""Every supported combination of versions; see integration.versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration.versions.__main__ import describe
from integration.versions.binaries import ServerMissing, provide
from integration.versions.pins import CELLS, SERVERS, TESTS, Server
from integration.versions.run import build_wheel, interpreter, run_cell


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", CELLS)
def test_a_combination_of_versions_works(name: str, wheel: Path, tmp_path: Path) -> None:
    runs = list(run_cell(name, wheel, tmp_path))
    assert [run.failed for run in runs] == [[] for _ in CELLS[name].servers]
    assert all(run.passed > 40 for run in runs)


@pytest.mark.parametrize("what", ["celery", "kombu", "dramatiq", "redis", "nats", "python"])
def test_every_supported_version_has_a_cell(what: str) -> None:
    supported = {"celery": ["5.3", "5.4", "5.5", "5.6", "5.7"], "kombu": ["5.3", "5.4", "5.5", "5.6", "5.7"],
                 "dramatiq": ["1.17", "1.18", "2.0", "2.1", "2.2"], "redis": ["5", "6", "7", "8"],
                 "nats": ["2.10", "2.16"], "python": ["3.10", "3.11", "3.12", "3.13"]}[what]
    pinned = [getattr(cell, what) for cell in CELLS.values()]
    assert [version for version in supported if not any(f"{pin}.".startswith(f"{version}.") for pin in pinned)] == []


@pytest.mark.parametrize("framework", ["celery", "dramatiq", "engine"])
def test_every_framework_has_a_cell_on_every_server(framework: str) -> None:
    tried = {kind for cell in CELLS.values() if cell.framework == framework for kind in cell.servers}
    assert tried == set(SERVERS)


@pytest.mark.parametrize("major", ["5", "6", "7", "8"])
def test_every_client_has_a_cell_with_hiredis_and_one_without(major: str) -> None:
    assert {bool(cell.hiredis) for cell in CELLS.values()
            if cell.framework == "engine" and cell.redis.split(".")[0] == major} == {True, False}


def test_every_test_that_is_named_is_there() -> None:
    root = Path(__file__).resolve().parent.parent
    for test in {test for tests in TESTS.values() for test in tests}:
        path, _, name = test.partition("::")
        assert f"def {name}" in (root / path).read_text()


def test_the_table_in_readme_is_about_these_cells() -> None:
    readme = (Path(__file__).resolve().parent.parent / "README.md").read_text()
    rows = [tuple(line.strip("| ").split(" | ")) for line in readme.splitlines() if line.startswith("| ")]
    quoted = [row for row in rows if row[0] in CELLS]
    known = {describe(name, kind) for name, cell in CELLS.items() for kind in cell.servers}
    assert quoted and {row[:-5] for row in quoted} <= known
    # passed, failed, faults, jobs judged, lost
    assert all(int(row[-5]) > 40 and (row[-4], row[-1]) == ("0", "0") for row in quoted)


def test_a_python_that_is_not_here_is_told() -> None:
    with pytest.raises(FileNotFoundError, match=r"no Python 2\.99: no python2\.99 on PATH"):
        interpreter("2.99")


def test_a_server_of_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMBROKER_VERSIONS", str(tmp_path))
    monkeypatch.setitem(SERVERS, "redis62", Server("Redis", "6.2.99"))
    (tmp_path / "redis-server-6.2.99").mkdir()
    other = tmp_path / "redis-server-6.2.99" / "redis-server"
    other.write_text("#!/bin/sh\necho 'Redis server v=6.2.14 sha=0'\n")
    other.chmod(0o755)
    with pytest.raises(ServerMissing, match=r"is not Redis 6\.2\.99: Redis server v=6\.2\.14"):
        provide("redis62")


def test_a_server_that_cannot_be_had_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMBROKER_VERSIONS", str(tmp_path / "cache"))
    monkeypatch.setitem(SERVERS, "redis62", Server("Redis", "6.2.99"))
    with pytest.raises(ServerMissing, match="no redis-server in"):
        provide("redis62")
