"""Laws of the reader: lazy, exact, only what is committed; and of `verify` and `gc`."""

import json

import numpy as np
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
import torch

import sweeps
from sweeps.commands import show
from sweeps.driver import enter
from sweeps.errors import ConfigError, Damaged
from sweeps.folder import garbage, schemas, tensors
from sweeps.folder.verify import verify
from sweeps.folder.writer import UnitWriter
from sweeps.plan.expand import expand
from tests.support import talk


@pytest.fixture
def root(tmp_path):
    """A finished run of 24 cells; cell n has vectors of value n (layer 1) and n + 2 (layer 3, means)."""
    config = talk.config(tmp_path)
    enter.enter(config, config.run.dir)
    number = 0
    for unit in expand(config):
        writer = UnitWriter(config.run.dir, unit, {"alice": "tiny", "bob": "tiny"}, attempt=f"{number:08x}")
        for trunk in unit.trunks:
            writer.add_trunk(trunk.id, [talk.Message("moderator", "hello"), talk.said("alice", "first")])
        for cell in unit.cells:
            messages = [talk.Message("moderator", cell.condition["framing"]), talk.said("bob", "so", 1)]
            writer.add_cell(cell, messages, answer(3, float(number)), {"words": number, "framing": "x"}, start=2)
            number += 1
        writer.commit()
    return tmp_path / "run"


def answer(index, value):
    """Records whose tokens are those of `said("bob", "so", 1)` at their positions."""
    found = talk.records(index, value)
    for record in found:
        record.tokens = (13, 14, 15)
    return found


def test_vectors_are_one_array_and_its_rows(root):
    run = sweeps.open(root)
    x, table = run.vectors(layer=3, participant="bob")
    assert x.shape == (24, 8) and x.dtype == np.float32
    assert np.array_equal(x[:, 0], np.arange(24) + 3)
    plan = run.cells.to_pandas().set_index("cell")
    for row in table.to_pylist():
        expected = plan.loc[row["cell"]]
        assert all(row[name] == expected[name] for name in ("item", "trunk_seed", "branch_seed", "framing"))
    warm, _ = run.vectors(layer=1, where=pc.field("message_idx") == 3)
    assert warm.shape == (24, 8)
    assert run.vectors(layer=1, where=pc.field("message_idx") == 77)[0].shape[0] == 0
    with pytest.raises(KeyError, match=r"no layer 2 in .*; it has: 1, 3"):
        run.vectors(layer=2)


def test_queries(root):
    run = sweeps.open(root)
    cell = run.cells["cell"][5].as_py()
    assert len(run.query(cell=cell)) == 3 and len(run.query(layer=[1, 3])) == 72 and len(run.query(pool=None)) == 24
    assert torch.equal(run.at(cell=cell, layer=3), torch.full((1, 8), 8.0))
    with pytest.raises(KeyError, match=r"2 records for cell=.*they differ in pool: mean, None"):
        run.at(cell=cell, layer=1)
    with pytest.raises(KeyError, match="no filter 'layers'; did you mean 'layer'"):
        run.query(layers=1)
    with pytest.raises(KeyError, match="0 records"):
        run.at(cell=cell, layer=2)
    for given, said in (({"layer": [2, 4]}, "no layer 2, 4"), ({"cell": "nope"}, "no cell nope in .*24 in all"),
                        ({"participant": "bo"}, "it has: bob"), ({"pool": "max"}, "it has: None, mean")):  # fmt: skip
        with pytest.raises(KeyError, match=said):
            run.query(**given)
    assert run.query(cell=cell, layer=3, pool=None) == [], "each of these exists"
    cache = run.cache(cell)
    assert len(cache) == 3 and torch.equal(
        cache.at(participant="bob", layer=1, pool=None)[0], torch.full((8,), 5.0).bfloat16()
    )


def test_outcomes_join_their_cells(root):
    table = sweeps.open(root).outcomes().to_pandas()
    assert sorted(table["words"]) == list(range(24)) and set(table["framing"]) == {"warm", "cold"}
    assert set(table["outcome.framing"]) == {"x"}, "an outcome never hides an axis"


def test_show_prints_a_conversation(root):
    run = sweeps.open(root)
    cell = run.cells["cell"][0].as_py()
    text = show.text(run, run.find(cell[:9]))
    assert "condition: framing=warm" in text and text.index("[1] alice: first") < text.index(
        "--- branch ---"
    ) < text.index("[3] bob")
    for beginning in ("zz", ""):
        with pytest.raises(ConfigError, match="cells begin with"):
            run.find(beginning)


def test_nothing_is_read_before_it_is_used(root, monkeypatch):
    opened = []
    real = tensors.open_file
    monkeypatch.setattr(tensors, "open_file", lambda *place: opened.append(place) or real(*place))
    run = sweeps.open(root)
    assert run.counts["done"] == 24 and run.table("records", ["layer"]).num_rows == 72
    run.messages(run.cells["cell"][0].as_py())
    assert not opened
    run.query(cell=run.cells["cell"][0].as_py())
    assert len(opened) == 1


def test_the_same_files_open_in_other_tools(root):
    import duckdb
    import pandas
    import polars

    run = sweeps.open(root)
    glob = f"{root}/records/*/*/*.parquet"
    counted = f"select count(*), count(distinct cell) from read_parquet('{glob}', hive_partitioning=true)"
    assert duckdb.sql(f"{counted} where model = 'tiny' and layer = 3").fetchall() == [(24, 24)]
    frame = polars.scan_parquet(glob, hive_partitioning=True).filter(polars.col("site") == "residual").collect()
    assert frame.height == 72
    assert len(pandas.read_parquet(run.files("messages"))) == run.table("messages").num_rows == 24 * 2 + 6 * 2
    axes = duckdb.sql(f"select framing, count(*) n from '{root}/plan/*.parquet' group by 1 order by 1").fetchall()
    assert axes == [("cold", 12), ("warm", 12)]
    plain = ds.dataset(str(root / "outcomes")).to_table()
    assert dict(plain["numbers"][0].as_py()) == {"words": 0.0}


def test_no_run_and_other_versions_are_refused(tmp_path, root):
    with pytest.raises(ConfigError, match="is no run folder"):
        sweeps.open(tmp_path)
    about = (root / "run.json").read_text()
    (root / "run.json").write_text(about.replace(f'"schema_version":{schemas.SCHEMA_VERSION}', '"schema_version":99'))
    with pytest.raises(ConfigError, match="schema version 99; this version reads 1, 2"):
        sweeps.open(root)


# ---- verify and gc


def test_a_sound_run_is_found_sound(root):
    found = verify(root, deep=True)
    assert found.ok and not found.notes and found.counts["records"] == 72 and found.counts["cells done"] == 24


def shard(root, table):
    return sorted(p for p in (root / table).rglob("*") if p.is_file())[1]


@pytest.mark.parametrize(("damage", "said", "deep_only"), [
    ("delete", "is missing", False), ("truncate", "its commit says", False), ("flip", "another sha256", True),
])  # fmt: skip
@pytest.mark.parametrize("table", ["messages", "records", "activations", "outcomes"])
def test_damage_is_found(root, table, damage, said, deep_only):
    path = shard(root, table)
    data = bytearray(path.read_bytes())
    if damage == "delete":
        path.unlink()
    elif damage == "truncate":
        path.write_bytes(data[:-7])
    else:
        footer = int.from_bytes(data[-8:-4], "little") + 8 if path.suffix == ".parquet" else 0
        data[-10 - footer] ^= 4
        path.write_bytes(data)
    found = verify(root, deep=True)
    assert any(said in problem and path.name in problem for problem in found.problems)
    assert verify(root).ok == deep_only


def test_a_plan_whose_pages_were_changed_is_not_read(root):
    path = root / "plan" / "part-0.parquet"
    data = bytearray(path.read_bytes())
    column = pq.read_metadata(path).row_group(0).column(0)
    data[column.dictionary_page_offset + column.total_compressed_size - 3] ^= 4
    path.write_bytes(data)
    with pytest.raises(OSError, match=r"checksum|[Cc]orrupt"):
        verify(root)


@pytest.mark.parametrize(("file", "content"), [
    ("config-0.yaml", b""), ("config-0.yaml", b"- 1"), ("config-0.yaml", b"{}"), ("run.json", b"null"),
    ("inputs/items-0.jsonl", b"null\n"), ("inputs/items-0.jsonl", b'{"id": "i0", "to'),
])  # fmt: skip
def test_files_that_hold_something_else_are_named(root, file, content):
    (root / file).write_bytes(content)
    with pytest.raises(Damaged, match=file):
        run = sweeps.open(root)
        _ = run.config, run.plan.check_items(0)
    if file != "run.json":
        assert any(file in problem for problem in verify(root, deep=True).problems)


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[: len(data) // 2], lambda data: b"no tensor"])
def test_tensors_in_a_damaged_file_are_not_read(root, damage):
    path = shard(root, "activations")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(Damaged, match=path.name):
        sweeps.open(root).vectors(layer=3)


def add_trunks(writer, unit):
    for trunk in unit.trunks:
        writer.add_trunk(trunk.id, [talk.said("alice", "so")], [])


def test_false_rows_are_found(root, tmp_path):
    config = talk.config(tmp_path, scenario={**talk.SCENARIO, "seed": 9}, run={"dir": str(tmp_path / "other")})
    enter.enter(config, config.run.dir)
    unit = next(iter(expand(config)))
    writer = UnitWriter(config.run.dir, unit, {"alice": "tiny", "bob": "tiny"})
    add_trunks(writer, unit)
    for n, cell in enumerate(unit.cells):
        records = answer(3, 1.0)
        if n == 0:
            records[0].tokens = (13, 14, 99)
        elif n == 1:
            records[2].token_span = (0, 5)
        elif n == 2:
            records[1].message_idx = 7
        elif n == 3:
            records[2].positions = (8, 9, 100)
        elif n == 4:
            records[2].phases = {"answer": (0, 4)}
        writer.add_cell(cell, [talk.said("bob", "so", 1)], records, start=3)
    writer.commit()
    found = verify(config.run.dir, deep=True)
    for n, said in enumerate(("token 99 at position 10, where the message has 15", "token_span says 5 rows",
                              "no message 7", "position 100, where the message has nothing",
                              "outside its 3 rows")):  # fmt: skip
        assert sum(unit.cells[n].id in problem and said in problem for problem in found.problems) == 1
    assert len(found.problems) == 5


def test_a_damaged_commit_is_named(root):
    path = root / "_commits" / "u000001.json"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(Damaged, match="u000001"):
        list(sweeps.open(root).commits())


@pytest.mark.parametrize("change", [
    {"unit": "u000009"}, {"unit": 1}, {"cells": "abc"}, {"cells": [1]}, {"files": ["x"]}, {"files": [{"path": "x"}]},
    {"children": [{}]}, {"attempt": None}, {"more": 1},
])  # fmt: skip
def test_a_commit_that_is_made_otherwise_is_named(root, change):
    path = root / "_commits" / "u000001.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    found = verify(root)
    assert len(found.problems) == 1 and "u000001.json" in found.problems[0] and found.damaged == ["u000001"]


def test_commits_account_for_what_their_units_were_given(root):
    path = root / "_commits" / "u000001.json"
    whole = json.loads(path.read_text())
    first, child = whole["cells"][0], sweeps.open(root).plan.unit("u000001").to_dict()
    one = {**child, "id": "u000001.0", "cells": [row for row in child["cells"] if row[0] == first]}
    rest = whole["cells"][1:]
    for change, said in (
        ({"cells": rest}, "accounts for 7 cells, of the 8"), ({"failed": [first]}, "accounts for 9 cells, of the 8"),
        ({"cells": rest, "children": [one]}, None), ({"children": [one]}, "accounts for 9 cells"),
        ({"cells": rest, "children": [{**one, "id": "../x"}]}, "names '../x' as its child"),
    ):  # fmt: skip
        path.write_text(json.dumps({**whole, **change}))
        problems = verify(root).problems
        assert not problems if said is None else any(said in problem for problem in problems)
    path.write_text(json.dumps(whole))
    (root / "_commits" / "u000077.json").write_text(json.dumps({**whole, "unit": "u000077", "cells": [], "files": []}))
    assert any("u000077 is of a unit that neither" in problem for problem in verify(root).problems)


def test_gc_deletes_only_what_no_commit_will_ever_name(root, tmp_path):
    leftover = root / "messages" / "u000000-deadbeef.parquet"
    open_unit = root / "messages" / "u000077-deadbeef.parquet"
    foreign = root / "messages" / "notes.txt"
    for path in (leftover, open_unit, foreign):
        path.write_bytes(b"x")
    before = {p for p in root.rglob("*") if p.is_file()}
    assert any("u000000-deadbeef" in note for note in verify(root).notes)
    assert garbage.collect(root, dry_run=True) == ["messages/u000000-deadbeef.parquet"]
    assert before == {p for p in root.rglob("*") if p.is_file()}
    assert garbage.collect(root) == ["messages/u000000-deadbeef.parquet"]
    left = {p for p in root.rglob("*") if p.is_file() and "_lease" not in p.parts}
    assert left == before - {leftover}
    found = verify(root, deep=True)
    assert found.ok and any("notes.txt" in note for note in found.notes)


def test_several_runs_are_read_together(root, tmp_path):
    config = talk.config(tmp_path, scenario={**talk.SCENARIO, "seed": 9}, run={"dir": str(tmp_path / "other")},
                         grid={"scenario.participants.bob.temperature": [0.1, 0.2]})  # fmt: skip
    enter.enter(config, config.run.dir)
    unit = next(iter(expand(config)))
    writer = UnitWriter(config.run.dir, unit, {"alice": "tiny", "bob": "tiny"})
    add_trunks(writer, unit)
    for cell in unit.cells:
        writer.add_cell(cell, [talk.said("bob", "other", 1)], answer(0, 100.0), {"words": 1}, start=0)
    writer.commit()
    both = sweeps.open([root, config.run.dir])
    assert both.cells.num_rows == 48 and len(both) == 2
    x, table = both.vectors(layer=1)
    assert x.shape == (32, 8) and set(table["run"].to_pylist()) == {str(root), config.run.dir}
    assert table["framing"].null_count == 8 and both.outcomes().num_rows == 32
    assert both.messages(unit.cells[0].id)[-1].content == "other" and len(both.query(layer=3)) == 32
    assert len(both.files("records")) == 4 and len(both.query(cell=unit.cells[0].id)) == 3, (
        "which the first does not have"
    )
    with pytest.raises(KeyError, match="no layer 9"):
        both.vectors(layer=9)
    with pytest.raises(KeyError, match="none of 2 runs"):
        both.messages("nope")


def test_routing_is_merged_by_tokens(root, tmp_path):
    from interlens.interp.expert_load import RoutingStats

    config = talk.config(tmp_path, run={"dir": str(tmp_path / "moe")})
    enter.enter(config, config.run.dir)
    unit = next(iter(expand(config)))
    writer = UnitWriter(config.run.dir, unit, {"alice": "tiny", "bob": "tiny"})
    add_trunks(writer, unit)
    expected = []
    for n, cell in enumerate(unit.cells):
        writer.add_cell(cell, [talk.said("bob", "so", 1)])
        found = []
        for layer in (0, 1):
            counts, mass = np.array([n + 1, 1, n + 2 * (layer + 1)]), np.array([0.5, 0.25, 0.25])
            counts[2] = 2 * (n + 2) - counts[:2].sum()
            found.append({"participant": "bob", "message_idx": None, "phase": "answer", "layer": layer,
                          "tokens": n + 2, "top_k": 2, "counts": counts, "mass": mass})  # fmt: skip
        expected.append(RoutingStats(torch.tensor(np.stack([f["counts"] / f["counts"].sum() for f in found])),
                                     torch.tensor(np.stack([f["mass"] for f in found])), (0, 1), n + 2, 2))  # fmt: skip
        writer.add_routing(cell, found)
    writer.commit()
    merged = expected[0]
    for more in expected[1:]:
        merged = merged.merge(more)
    run = sweeps.open(config.run.dir)
    stats = run.routing_stats(participant="bob", phase="answer")
    assert torch.allclose(stats.expert_load, merged.expert_load, atol=1e-12)
    assert torch.allclose(stats.expert_mass, merged.expert_mass) and stats.n_tokens == merged.n_tokens
    assert run.routing_stats(cell=unit.cells[0].id).n_tokens == 2
    with pytest.raises(KeyError, match="no routing for"):
        run.routing_stats(participant="alice")
    assert verify(config.run.dir, deep=True).ok
