"""What many tests of sweeps start from."""

import shutil
import tempfile

import pytest

from sweeps import driver
from tests.sweeps.small import build_model, contents, settings


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A tiny float32 chat model in a folder that nobody changes."""
    return build_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def undisturbed(model, tmp_path_factory):
    """What the 32 cells of `small.settings` over 8 items are where nothing happens."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    assert driver.run(settings(model, num_items=8), folder) == 0
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
