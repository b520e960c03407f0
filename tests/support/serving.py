"""`transformers serve` on a free port of 127.0.0.1, with a local model folder."""

from __future__ import annotations

import http.client
import os
import random
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager


@contextmanager
def transformers_server(folder: str, timeout_s: float = 90.0):
    """Yields the base URL of an OpenAI-compatible server; `folder` is the model id to ask for."""
    port = _free_port()
    command = [sys.executable, "-c", "from transformers.cli.transformers import main; main()", "serve", folder]
    command += ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "float32"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).read()
                break
            except (OSError, http.client.HTTPException):
                if process.poll() is not None or time.monotonic() > deadline:
                    process.kill()
                    raise RuntimeError(
                        f"transformers serve did not start:\n{process.communicate()[0][-3000:]}"
                    ) from None
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        try:
            process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def _free_port() -> int:
    """One below the range that systems hand out by themselves, so that nobody takes it in the meantime."""
    while True:
        port = random.randrange(21000, 30000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
