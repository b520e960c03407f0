"""The outcome table is what plain counting says, whatever the order of its cells."""

import json
from dataclasses import replace

import numpy as np
import pytest

from sweeps.aggregates.registry import build
from sweeps.config.schema import AggregateConfig
from sweeps.report.findings import SAID
from sweeps.report.markup import interval
from sweeps.report.sections import SECTIONS
from tests.support.stored import results, stored


def table(run, **options):
    return build([AggregateConfig(name="outcome_table", options={"draws": 50, **options})])[0].fit(run)


def test_means_are_those_of_plain_counting():
    cells, _ = results(labels=("warm", "cold"), items=6)
    run = stored(cells)
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
    assert "warm" in page and "trunk_seed == 1" in page and page.count('class="cos') == 8
    (line,) = SAID["outcome_table"]({"name": "some", **found})
    best = max(found["tables"][0]["cells"], key=lambda e: e["mean"]["value"])
    at = f"{interval(best['mean'], 2)} at framing {best['row']} with branch_seed {best['column']}"
    assert line.startswith(f"some: score, even False is largest with {at}")
    constant = [{"row": "warm", "column": 0, "count": 3, "mean": {"value": 0.5, "low": 0.5, "high": 0.5}}] * 2
    same = {**found, "tables": [{"measure": "score", "by": {}, "cells": constant}]}
    assert "0.5 (0.5 to 0.5) everywhere, over 3 cells each" in SECTIONS["outcome_table"](same)
    assert SAID["outcome_table"]({"name": "some", **same}) == ["some: score is 0.5 everywhere."]


def test_one_axis_is_one_column_and_unknown_ones_are_refused():
    run = stored(results(items=3)[0])
    found = table(run)
    assert found["columns"] is None and [len(part["cells"]) for part in found["tables"]] == [2]
    with pytest.raises(ValueError, match="no column 'layer_'"):
        build([AggregateConfig(name="outcome_table", options={"rows": "layer_"})], run.config)


def test_ties_are_all_named():
    cells = [{"row": row, "column": column, "count": 2, "mean": {"value": value, "low": value, "high": value}}
             for row, column, value in (("early", "fact", 1), ("mid", "fact", 1), ("late", "fact", 0), ("early", "end", 0),
                                        ("mid", "end", 0), ("late", "end", 0))]  # fmt: skip
    result = {"name": "trace", "rows": "layers", "columns": "tokens", "row_levels": ["early", "mid", "late"],
              "column_levels": ["fact", "end"], "tables": [{"measure": "clean", "by": {}, "cells": cells}]}  # fmt: skip
    said = "trace: clean is largest with 1 (1 to 1) at layers early, mid with tokens fact; for other tokens at most 0."
    assert SAID["outcome_table"](result) == [said]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_outcomes_that_are_no_numbers_are_left_out_and_counted(value):
    cells = results(labels=("warm", "cold"), items=6)[0]
    whole = table(stored(cells))
    spoilt = [replace(r, outcomes={"score": value}) if r.cell.item == "i0" else r for r in cells]
    found = table(stored(spoilt))
    assert whole["non_finite"] == 0 and found["non_finite"] == sum(r.cell.item == "i0" for r in cells) > 0
    json.dumps(found, allow_nan=False)
    assert "are left out" in SECTIONS["outcome_table"](found) and SAID["outcome_table"]({"name": "some", **found})
    assert table(stored([replace(r, outcomes={"score": value}) for r in cells]))["tables"] == []
