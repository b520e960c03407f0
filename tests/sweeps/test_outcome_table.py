"""The outcome table is what plain counting says, whatever the order of its cells."""

import numpy as np
import pytest

from sweeps.aggregates import build
from sweeps.config import AggregateConfig
from sweeps.report.results import SECTIONS
from tests.sweeps.stored import StoredRun, results


def table(run, **options):
    return build([AggregateConfig(name="outcome_table", options={"draws": 50, **options})])[0].fit(run)


def test_means_are_those_of_plain_counting():
    cells, _ = results(labels=("warm", "cold"), items=6)
    run = StoredRun(cells)
    run.item_rows = {r.cell.item: r.item_row for r in cells}
    found = table(run, rows="framing", columns="branch_seed", by=["item.even"], where="trunk_seed == 1")
    assert found["row_levels"] == ["warm", "cold"] and found["column_levels"] == [0, 1]
    assert [part["by"] for part in found["tables"]] == [{"item.even": False}, {"item.even": True}]
    for part in found["tables"]:
        assert len(part["cells"]) == 4
        for entry in part["cells"]:
            plain = [
                r.outcomes["score"] for r in cells
                if r.cell.trunk_seed == 1 and r.cell.condition["framing"] == entry["row"]
                and r.cell.branch_seed == entry["column"] and r.item_row["even"] == part["by"]["item.even"]
            ]  # fmt: skip
            assert entry["count"] == len(plain) == 3 and np.isclose(entry["mean"]["value"], np.mean(plain))
            assert entry["mean"]["low"] <= entry["mean"]["value"] <= entry["mean"]["high"]
    page = SECTIONS["outcome_table"](found)
    assert "warm" in page and "trunk_seed == 1" in page and page.count("<svg") == 8


def test_one_axis_is_one_column_and_unknown_ones_are_refused():
    run = StoredRun(results(items=3)[0])
    found = table(run)
    assert found["columns"] is None and [len(part["cells"]) for part in found["tables"]] == [2]
    with pytest.raises(ValueError, match="no column 'layer_'"):
        build([AggregateConfig(name="outcome_table", options={"rows": "layer_"})], run.config)
