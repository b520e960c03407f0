"""Columns of expressions: the same value on a replica and over stored data; labels joined by cell and message."""

import pyarrow as pa
import pytest

from sweeps.aggregates import registry
from sweeps.aggregates.columns import columns, evaluated, read_labels, short_names
from sweeps.config.schema import AggregateConfig
from tests.support.stored import results, stored

RESULTS, _ = results(items=6)
RUN = stored(RESULTS)


def table():
    return RUN.vectors(layer=16, participant="bob")[1]


def test_short_names_are_unambiguous_and_never_hide_a_fixed_column():
    assert short_names(["intervention.coef", "framing"]) == {"coef": "intervention.coef"}
    assert short_names(["a.coef", "b.coef"]) == {}
    assert short_names(["x.layer", "b.coef"]) == {"coef": "b.coef"}


def test_outcomes_axes_and_fixed_columns_are_looked_up_by_row():
    found = columns(RUN, table(), ["framing", "outcome.score", "item"])
    for row, result in zip(found.to_pylist(), RESULTS, strict=True):
        assert row == {"framing": result.cell.condition["framing"], "item": result.cell.item,
                       "outcome.score": result.outcomes["score"]}  # fmt: skip
    with pytest.raises(KeyError, match=r"no outcome 'mood'; there are: .*score"):
        columns(RUN, table(), ["outcome.mood"])
    with pytest.raises(KeyError, match=r"there are: .*framing"):
        columns(RUN, table(), ["frame"])


def test_message_fields_come_from_the_message_of_the_record():
    made = results(items=2)[0]
    for result in made:
        result.records[1].message_idx = 2
    run = stored(made)
    found = columns(run, run.vectors(layer=16, participant="bob")[1], ["message.author", "message.finish_reason"])
    assert set(map(tuple, (row.values() for row in found.to_pylist()))) == {("bob", "stop")}


def test_distinct_rows_are_evaluated_once():
    rows = pa.table({"a": [1, 2, None, 1, 2, None] * 100, "b": ["x", "x", "y", "x", "z", "y"] * 100})
    seen = []
    found = evaluated(rows, lambda row: seen.append(row) or (row["a"], row["b"]))
    assert [tuple(row.values()) for row in rows.to_pylist()] == found.tolist()
    assert len(seen) == 4
    assert len(evaluated(rows.slice(0, 0), lambda row: 1)) == 0


def test_labels_that_cannot_be_joined_are_refused(tmp_path):
    path = tmp_path / "labels.csv"
    path.write_text("id,good\nc1,1\n")
    with pytest.raises(ValueError, match="no column 'cell'; it has: id, good"):
        read_labels(str(path))
    path.write_text("cell,good\nc1,1\nc1,0\n")
    with pytest.raises(ValueError, match="two rows for one cell"):
        read_labels(str(path))
    with pytest.raises(ValueError, match="no file"):
        read_labels(str(tmp_path / "none.csv"))
    with pytest.raises(ValueError, match=r"label.<column> \(with labels: FILE\)"):
        options = {"contrast": "label.good == 1 vs label.good == 0"}
        registry.build([AggregateConfig(name="directions", options=options)], RUN.config)
