"""A finished run with everything in it."""

import pytest

from sweeps.cli import main
from sweeps.driver import entry
from tests.support.small import settings

SMALL = {"num_items": 1, "unit_cells": 2, "aggregate": {"outcomes": {}, "directions": {
    "kind": "difference_of_means", "contrast": "framing == 'warm' vs framing == 'cold'", "participant": "bob"}}}  # fmt: skip


@pytest.fixture(scope="module")
def made(model, tmp_path_factory):
    """A finished run with everything in it: records, aggregates, a report, a capture, unnamed files, a copied direction."""
    folder = tmp_path_factory.mktemp("made") / "run"
    assert entry.run(settings(model, **SMALL), folder) == 0
    assert main(["report", str(folder)]) == 0
    assert main(["capture", str(folder), "layers=1", "sites=mlp", "pool=mean", "run.progress=none"]) == 0
    (folder / "messages" / "u000000-deadbeef.parquet").write_bytes(b"garbage")
    return folder
