"""What many tests of sweeps start from."""

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
