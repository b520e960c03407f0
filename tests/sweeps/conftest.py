"""What many tests of sweeps start from."""

import json
import os
import shutil
import tempfile

import pytest

from sweeps.driver import entry
from tests.support import nodes
from tests.support.faulty import FaultyStore
from tests.support.small import build_model, contents, settings


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A tiny float32 chat model in a folder that nobody changes."""
    return build_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def undisturbed(model, tmp_path_factory):
    """What the 32 cells of `small.settings` over 8 items are where nothing happens."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    assert entry.run(settings(model, num_items=8), folder) == 0
    return contents(folder)


@pytest.fixture
def a_ray():
    """A small Ray of this process's own."""
    import ray

    short = tempfile.mkdtemp(prefix="ray")  # its sockets need a short path
    ray.init(
        num_cpus=2, include_dashboard=False, object_store_memory=100_000_000, _temp_dir=short, log_to_driver=False
    )  # fmt: skip
    yield
    ray.shutdown()
    shutil.rmtree(short, ignore_errors=True)


@pytest.fixture(scope="session")
def faulty():
    """An S3 server with a bucket `runs`, behind a proxy that a test can make fail. Its clients try twice, for seconds."""
    import s3fs
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    proxy = FaultyStore(*server.get_host_and_port())
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"AWS_ENDPOINT_URL": proxy.url, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
                            "AWS_DEFAULT_REGION": "us-east-1", "AWS_MAX_ATTEMPTS": "2",
                            "FSSPEC_S3": json.dumps({"config_kwargs": {"read_timeout": 1}})}.items():  # fmt: skip
            patch.setenv(name, value)  # processes that begin after this read them; this one has fsspec already:
        patch.setattr(s3fs.S3FileSystem, "read_timeout", 1)
        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem().mkdir("runs")
        yield proxy
        s3fs.S3FileSystem.clear_instance_cache()
    proxy.close()
    server.stop()


@pytest.fixture(scope="session")
def cluster(faulty):
    """Three nodes of a Ray of this process's own, which know the way to the object store."""
    os.environ["RAY_memory_monitor_refresh_ms"] = "0"  # noqa: SIM112 (as Ray spells it)
    made = nodes.start()
    yield made
    made.shutdown()


@pytest.fixture
def sweep(cluster, tmp_path, monkeypatch):
    """A sweep on three nodes. Failpoints happen once in all its processes together."""
    monkeypatch.setenv("SWEEPS_FAILPOINTS_ONCE", str(tmp_path / "once"))
    (tmp_path / "once").mkdir()
    return nodes.Sweep(cluster, tmp_path / "run")
