"""An authority for tests, and TLS in front of a plain server, since servers from wheels are built without it.

    authority = Authority(folder)
    with TlsFront(server.port, authority) as front:
        connect(server.url("rediss-streams", port=front.port), ssl_ca_certs=str(authority.ca_file))
"""

from __future__ import annotations

import asyncio
import ssl
import threading
from pathlib import Path
from types import TracebackType

import trustme

from ..embedded import free_port


class Authority:
    """A certificate authority for a test, its files in `folder`: `ca_file`, `client_file` (certificate and key)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ca = trustme.CA()
        self.ca_file = folder / "ca.pem"
        self.client_file = folder / "client.pem"
        self._ca.cert_pem.write_to_path(str(self.ca_file))
        self._ca.issue_cert("client@example.org").private_key_and_cert_chain_pem.write_to_path(str(self.client_file))

    def server_file(self, name: str) -> Path:
        """Certificate and key of a server called `name`."""
        path = self._folder / f"{name}.pem"
        self._ca.issue_cert(name).private_key_and_cert_chain_pem.write_to_path(str(path))
        return path

    def redis_lines(self, port: int, name: str) -> list[str]:
        """Lines of the configuration of a Redis or sentinel called `name`: TLS on `port`, and towards other servers,
        whose names it does not check."""
        own = self.server_file(name)
        return [f"tls-port {port}", f"tls-cert-file {own}", f"tls-key-file {own}", f"tls-ca-cert-file {self.ca_file}",
                "tls-auth-clients no", "tls-replication yes"]

    def server_context(self, name: str, *, ask_client: bool = False) -> ssl.SSLContext:
        """For a server called `name`; with `ask_client` clients must show a certificate of this authority."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._ca.issue_cert(name).configure_cert(context)
        if ask_client:
            self._ca.configure_trust(context)
            context.verify_mode = ssl.CERT_REQUIRED
        return context


class TlsFront:
    """Takes TLS connections on 127.0.0.1 (`port`) and passes the plain bytes on to the port `target`.

    `name` is what the certificate is for: another one than 127.0.0.1 is how a wrong host looks.
    """

    def __init__(self, target: int, authority: Authority, *, name: str = "127.0.0.1",
                 ask_client: bool = False) -> None:
        self.target = target
        self.port = free_port()
        self._context = authority.server_context(name, ask_client=ask_client)
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"tls-{self.port}", daemon=True)

    def __enter__(self) -> TlsFront:
        self._thread.start()
        if not self._ready.wait(10):
            raise AssertionError("the TLS front did not start")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(10)

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    async def _serve(self) -> None:
        tasks: set[asyncio.Task[None]] = set()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            tasks.add(task)
            try:
                await self._connect(reader, writer)
            finally:
                tasks.discard(task)

        server = await asyncio.start_server(serve, "127.0.0.1", self.port, ssl=self._context)
        # a refused handshake is the test's purpose, not news
        self._loop.set_exception_handler(lambda loop, context: None)
        self._ready.set()
        await self._over.wait()
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # aborted transports close in the loop's next turn

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        plain_reader, plain_writer = await asyncio.open_connection("127.0.0.1", self.target)
        try:
            await asyncio.gather(_copy(reader, plain_writer), _copy(plain_reader, writer))
        finally:
            plain_writer.transport.abort()
            writer.transport.abort()


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    """Until either end is gone; then close the other side."""
    try:
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()
    except (ConnectionError, ssl.SSLError):
        pass
    sink.close()
