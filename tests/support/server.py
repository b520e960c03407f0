"""A small HTTP server on 127.0.0.1 that speaks the OpenAI and Anthropic protocols, and misbehaves on request."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class ChatServer:
    """`script`: what happens to each request in turn; then it answers. A step is a text, a dict (an assistant message),
    ("status", code, headers), "cut", "garbage", "drip" (blanks for 5 s) or ("slow", seconds)."""

    def __init__(self, script: Sequence[Any] = (), pause_s: float = 0.0):
        self.script, self.pause_s = list(script), pause_s
        self.requests: list[dict[str, Any]] = []
        self.times: list[float] = []
        self.in_flight = self.most_in_flight = 0
        self.lock = threading.Lock()

    def next(self, body: dict) -> Any:
        with self.lock:
            self.requests.append(body)
            self.times.append(time.monotonic())
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            return self.script.pop(0) if self.script else f"Answer {len(self.requests)}."

    def leave(self) -> None:
        with self.lock:
            self.in_flight -= 1


def _openai(message: Any) -> dict:
    message = (
        {"role": "assistant", "content": message} if isinstance(message, str) else {"role": "assistant", **message}
    )
    reason = "tool_calls" if message.get("tool_calls") else "stop"
    choice = {"index": 0, "message": message, "finish_reason": reason}
    usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
    return {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}


def _anthropic(message: Any) -> dict:
    blocks = [{"type": "text", "text": message}] if isinstance(message, str) else message["blocks"]
    reason = "tool_use" if any(b["type"] == "tool_use" for b in blocks) else "end_turn"
    usage = {"input_tokens": 10, "output_tokens": 5}
    return {
        "id": "x", "type": "message", "role": "assistant", "model": "m", "content": blocks, "stop_reason": reason,
        "stop_sequence": None, "usage": usage,
    }  # fmt: skip


@contextmanager
def serve(chat: ChatServer):
    """Yields the base URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args):
            pass

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            step = chat.next(body)
            try:
                time.sleep(chat.pause_s)
                if isinstance(step, tuple) and step[0] == "slow":
                    time.sleep(step[1])
                    step = "Late."
                if step == "cut":
                    self.close_connection = True
                    self.connection.shutdown(2)
                elif step == "drip":
                    self._send(200, b"", {"Content-Length": "50"})
                    for _ in range(50):
                        self.wfile.write(b" ")
                        time.sleep(0.1)
                elif step == "garbage":
                    self._send(200, b'{"choices": [{"mess', {})
                elif isinstance(step, tuple):
                    self._send(step[1], b'{"error": {"message": "told to fail"}}', step[2])
                else:
                    made = _anthropic(step) if self.path.endswith("/messages") else _openai(step)
                    self._send(200, json.dumps(made).encode(), {})
            except OSError:
                pass  # the client has given up
            finally:
                chat.leave()

        def _send(self, status: int, data: bytes, headers: dict[str, str]):
            self.send_response(status)
            for name, value in {
                "Content-Type": "application/json",
                "Content-Length": str(len(data)),
                **headers,
            }.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
