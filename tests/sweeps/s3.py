"""A real S3 server of this process, empty, and the environment that leads to it."""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Callable
from contextlib import contextmanager


@contextmanager
def serving(front: Callable = "http://{}:{}".format, **settings: str):
    """Serve the bucket `runs` and yield what `front(host, port)` makes: the server's address, or a proxy with a `url`."""
    import s3fs
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    # All of moto's servers in one process hold the same buckets.
    urllib.request.urlopen(urllib.request.Request(f"http://{host}:{port}/moto-api/reset", method="POST")).close()
    face = front(host, port)
    given = {"AWS_ENDPOINT_URL": getattr(face, "url", face), "AWS_ACCESS_KEY_ID": "test",
             "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1", **settings}  # fmt: skip
    before = {key: os.environ.get(key) for key in given}
    os.environ.update(given)
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        s3fs.S3FileSystem().mkdir("runs")
        yield face
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
        server.stop()
        for key, value in before.items():
            os.environ.pop(key) if value is None else os.environ.update({key: value})
