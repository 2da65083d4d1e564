"""HTTP in front of a queue: `python server.py 8000`.

    POST /quotes {"pages": 12}    publishes a job and waits for its result
    GET /quotes/<id>              waits for the result of a job that was published before

Both answer 200 with the result, 422 when the job has failed, or 503 with Retry-After when the result is not there
within the time that the client has (`Prefer: wait=SECONDS`). Location names the job: asking there again finds the
result as soon as it is there. A 503 without Location means that nothing was accepted: post again.
"""

from __future__ import annotations

import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from app import app, quote
from celery.exceptions import TimeoutError
from kombu.exceptions import OperationalError

from streambroker.kombu.failures import LoginRefused

#: seconds that a client waits unless it says otherwise, and at most
PATIENCE, MOST = 2.0, 30.0
#: seconds after which it should ask again
RETRY_AFTER = 1


class Handler(BaseHTTPRequestHandler):
    """One request, in a thread of its own."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path != "/quotes":
            return self.answer(404, {"error": "POST /quotes"})
        try:
            pages = int(json.loads(text)["pages"])
        except (ValueError, KeyError, TypeError):
            return self.answer(400, {"error": 'the body is {"pages": NUMBER}'})
        try:
            job = quote.delay(pages)
        except (OperationalError, LoginRefused, ConnectionError) as error:
            return self.answer(503, {"error": f"the queue is away: {error}"})
        return self.wait(job.id)

    def do_GET(self) -> None:
        found = re.fullmatch(r"/quotes/([0-9a-f-]{36})", self.path)
        if found is None:
            return self.answer(404, {"error": "GET /quotes/ID"})
        return self.wait(found[1])

    def wait(self, job: str) -> None:
        """No thread polls here: the store wakes it when the result is stored."""
        place = f"/quotes/{job}"
        try:
            result = app.AsyncResult(job).get(timeout=self.patience())
        except TimeoutError:
            self.answer(503, {"error": "not yet"}, place)
        except ConnectionError as error:
            self.answer(503, {"error": f"the results are away: {error}"}, place)
        except ValueError as error:
            self.answer(422, {"error": str(error)}, place)
        else:
            self.answer(200, result, place)

    def patience(self) -> float:
        asked = re.search(r"\bwait=(\d+(\.\d+)?)", self.headers.get("Prefer") or "")
        return min(float(asked[1]) if asked else PATIENCE, MOST)

    def answer(self, status: int, body: dict[str, Any], place: str = "") -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if place:
            self.send_header("Location", place)
        if status == 503:
            self.send_header("Retry-After", str(RETRY_AFTER))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing of each request."""


class Server(ThreadingHTTPServer):
    request_queue_size = 128


if __name__ == "__main__":
    server = Server(("127.0.0.1", int(sys.argv[1] if len(sys.argv) > 1 else 8000)), Handler)
    print(f"listening on http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()
