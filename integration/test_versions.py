"""Every supported combination of versions; see integration.versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration.versions import CELLS, build_wheel, interpreter, run_cell


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CELLS)
def test_a_combination_of_versions_works(name: str, wheel: Path, tmp_path: Path) -> None:
    outcome = run_cell(name, wheel, tmp_path)
    assert outcome.failed == []
    assert outcome.passed > 100


@pytest.mark.parametrize("what", ["celery", "kombu", "redis", "python"])
def test_every_supported_version_has_a_cell(what: str) -> None:
    supported = {"celery": ["5.3", "5.4", "5.5", "5.6", "5.7"], "kombu": ["5.3", "5.4", "5.5", "5.6", "5.7"],
                 "redis": ["5", "6", "7", "8"], "python": ["3.10", "3.11", "3.12", "3.13"]}[what]
    pinned = [getattr(cell, what) for cell in CELLS.values()]
    assert [version for version in supported if not any(f"{pin}.".startswith(f"{version}.") for pin in pinned)] == []


def test_a_python_that_is_not_here_is_told() -> None:
    with pytest.raises(FileNotFoundError, match=r"no Python 2\.99: no python2\.99 on PATH"):
        interpreter("2.99")
