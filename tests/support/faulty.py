"""An object store that misbehaves: a real HTTP proxy in front of a real S3 server, which drops or refuses requests."""

from __future__ import annotations

import contextlib
import http.client
import threading
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Fault = str | None
"""None: pass on; "503": refuse; "lost": pass on and cut the connection instead of answering; "hang": never answer."""


class FaultyStore:
    """Listens on `url` and passes requests on to host:port, but for what `fault(number, method, path, headers)` says."""

    def __init__(self, host: str, port: int):
        self.fault: Callable[[int, str, str, http.client.HTTPMessage], Fault] = lambda *request: None
        self.number, self.met = 0, Counter()
        """Requests so far; how often each fault was met."""
        self._lock, self._released = threading.Lock(), threading.Event()
        store = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # or a reply's body waits for the client to acknowledge its header

            def answer(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(length)
                with store._lock:
                    store.number += 1
                    fault = store.fault(store.number, self.command, self.path, self.headers)
                    store.met.update([fault] if fault else [])
                if fault == "hang":
                    store._released.wait(60)
                    self.close_connection = True
                    return
                if fault == "503":
                    self.reply(
                        503, [], b"<Error><Code>ServiceUnavailable</Code><Message>come back later</Message></Error>"
                    )
                    return
                backend = http.client.HTTPConnection(host, port, timeout=30)
                backend.request(self.command, self.path, body, dict(self.headers))
                response = backend.getresponse()
                content = response.read()
                backend.close()
                if fault == "lost":
                    self.close_connection = True
                    return
                kept = [(k, v) for k, v in response.getheaders() if k.lower() not in HOP_BY_HOP]
                self.reply(response.status, kept, content, response.getheader("Content-Length"))

            def reply(self, status, headers, content, length=None) -> None:
                self.send_response(status)
                for name, value in headers:
                    self.send_header(name, value)
                self.send_header("Content-Length", length if self.command == "HEAD" and length else str(len(content)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer

            def log_message(self, *arguments) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @contextlib.contextmanager
    def failing(self, fault):
        """Faults inside the block; none after it."""
        before, self.fault = self.fault, fault
        self.met.clear()
        try:
            yield self
        finally:
            self.fault = before

    def close(self) -> None:
        self._released.set()
        self._server.shutdown()
        self._server.server_close()


HOP_BY_HOP = ("connection", "transfer-encoding", "content-length", "keep-alive", "date", "server")
