"""Laws of the writer: written is read, nothing is seen before the commit, one commit per unit."""

import hashlib
import threading

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

import sweeps
from sweeps.driver import enter
from sweeps.folder import commits, schemas, tensors
from sweeps.folder.reader import RunFolder
from sweeps.folder.store import open_store
from sweeps.folder.writer import UnitWriter
from sweeps.plan.expand import expand
from tests.support import talk

MODELS = {"alice": "tiny", "bob": "tiny"}


@pytest.fixture
def run(tmp_path):
    config = talk.config(tmp_path)
    enter.enter(config, config.run.dir)
    return config, list(expand(config))


def write(config, unit, fail=(), **options):
    writer = UnitWriter(config.run.dir, unit, MODELS, **options)
    for n, trunk in enumerate(unit.trunks):
        writer.add_trunk(trunk.id, [talk.Message("moderator", "hello"), talk.said("alice", f"t {trunk.id}", n)])
    for n, cell in enumerate(unit.cells):
        if cell.id in fail:
            writer.fail_cell(cell, "ValueError: no", "Traceback ...")
            continue
        messages = [talk.Message("moderator", "framing"), talk.said("bob", f"c {cell.id}", n)]
        writer.add_cell(cell, messages, talk.records(3, float(n)), {"words": n, "mood": "good"}, start=2)
    writer.add_sums("moments", {"count": np.array([len(unit.cells)]), "mean": np.arange(6.0).reshape(2, 3)})
    return writer


def test_written_is_read(run):
    config, units = run
    for unit in units:
        assert write(config, unit).commit(counters={"tokens": 5}) == "won"
    run = sweeps.open(config.run.dir)
    assert run.counts == {"done": 24, "failed": 0, "pending": 0}
    unit = units[1]
    for n, cell in enumerate(unit.cells):
        messages = run.messages(cell.id)
        t = [trunk.id for trunk in unit.trunks].index(cell.trunk)
        expected = [talk.Message("moderator", "hello"), talk.said("alice", f"t {cell.trunk}", t),
                    talk.Message("moderator", "framing"), talk.said("bob", f"c {cell.id}", n)]  # fmt: skip
        assert messages == expected and [m.fed for m in messages] == [m.fed for m in expected]
        for given, found in zip(talk.records(3, float(n)), run.query(cell=cell.id), strict=True):
            assert torch.equal(given.tensor, found.tensor) and given.tensor.dtype == found.tensor.dtype
            given.tensor = found.tensor = None
            assert given == found
    assert [dict(s)["mean"].shape for s in run.sums("moments")] == [(2, 3)] * 3
    assert list(run.sums("other")) == []


def test_nothing_exists_before_the_commit(run):
    config, units = run
    writer = write(config, units[0])
    writer._flush(writer._shards["tiny"])
    seen = sweeps.open(config.run.dir)
    assert seen.counts["pending"] == 24 and not any(seen.files(t) for t in ("messages", "records", "activations"))
    writer.commit()
    assert sweeps.open(config.run.dir).counts["done"] == 8


def test_a_unit_is_closed_once(run):
    config, units = run
    first, second = write(config, units[0], attempt="aaaaaaaa"), write(config, units[0], attempt="bbbbbbbb")
    outcome = {}
    threads = [threading.Thread(target=lambda w=w: outcome.update({w.attempt: w.commit()})) for w in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcome.values()) == ["lost", "won"]
    winner = next(attempt for attempt, said in outcome.items() if said == "won")
    run = sweeps.open(config.run.dir)
    assert [c.attempt for c in run.commits()] == [winner]
    assert all(winner in name for t in ("messages", "records", "activations", "stats") for name in run.files(t))
    assert run.table("records").num_rows == 8 * 3


def test_the_same_attempt_hears_that_it_won(run):
    config, units = run
    commit = commits.Commit(unit=units[0].id, attempt="aaaaaaaa", cells=("x",))
    assert commits.write_commit(config.run.dir, commit) == "won"
    assert commits.write_commit(config.run.dir, commit) == "won"
    assert commits.read_commit(config.run.dir, units[0].id) == commit


def test_an_existing_name_is_an_error(run):
    config, units = run
    assert write(config, units[0], attempt="aaaaaaaa").commit() == "won"
    with pytest.raises(FileExistsError):
        write(config, units[0], attempt="aaaaaaaa").commit()


def test_a_failed_cell_has_only_its_failure(run):
    config, units = run
    bad = units[0].cells[3].id
    write(config, units[0], fail=[bad]).commit()
    run = sweeps.open(config.run.dir)
    assert run.counts == {"done": 7, "failed": 1, "pending": 16}
    assert run.table("failures").to_pylist()[0] | {"attempt": ""} == {
        "unit": "u000000", "attempt": "", "trunk": units[0].cells[3].trunk, "cell": bad, "error": "ValueError: no",
        "traceback": "Traceback ...", "attempts": 1,
    }  # fmt: skip
    for table in ("messages", "records", "outcomes"):
        assert bad not in run.table(table)["cell"].to_pylist()
    with pytest.raises(KeyError, match="failed"):
        run.messages(bad)


def test_a_retry_takes_the_failures_place(run):
    config, units = run
    bad = units[0].cells[3]
    write(config, units[0], fail=[bad.id]).commit()
    retried = type(units[0])(id="u000000.r", cells=(bad,), trunks=(), items={})
    write(config, retried).commit()
    run = sweeps.open(config.run.dir)
    assert run.counts == {"done": 8, "failed": 0, "pending": 16}
    assert run.table("failures").num_rows == 0
    assert run.messages(bad.id)[-1].content == f"c {bad.id}"


def test_an_outcome_that_is_no_value_keeps_nothing_of_its_cell(run):
    config, units = run
    writer = UnitWriter(config.run.dir, units[0], MODELS)
    with pytest.raises(ValueError, match="possible: numbers and strings"):
        writer.add_cell(units[0].cells[0], [talk.said("bob", "x")], talk.records(0, 1.0), {"bad": [1]})
    with pytest.raises(KeyError):
        writer.add_cell(units[0].cells[0], [talk.said("bob", "x")], [talk.ActivationRecord("carl", *([0] * 5))])
    writer.fail_cell(units[0].cells[0], "e", "t")
    with pytest.raises(ValueError, match="already failed"):
        writer.add_cell(units[0].cells[0], [talk.said("bob", "x")])
    writer.commit()
    run = sweeps.open(config.run.dir)
    assert run.table("failures").num_rows == 1 and not run.files("messages") and not run.files("activations")


def test_commits_say_what_the_files_are(run):
    config, units = run
    write(config, units[0]).commit()
    root = sweeps.open(config.run.dir).root
    (commit,) = commits.list_commits(root)
    assert {f["table"] for f in commit.files} == {"messages", "records", "activations", "stats", "outcomes"}
    for file in commit.files:
        data = (root / file["path"]).read_bytes()
        assert len(data) == file["bytes"] and hashlib.sha256(data).hexdigest() == file["sha256"]
        if file["path"].endswith(".parquet"):
            assert pq.read_metadata(root / file["path"]).num_rows == file["rows"]
            assert (
                pq.read_schema(root / file["path"]).metadata[b"schema_version"] == str(schemas.SCHEMA_VERSION).encode()
            )
    assert not list((root / "_tmp").iterdir())


def test_abandoned_attempts_leave_nothing(run):
    config, units = run
    writer = write(config, units[0])
    writer._flush(writer._shards["tiny"])
    writer.abandon()
    assert not [p for p in sweeps.open(config.run.dir).root.rglob("*.safetensors")]


def test_big_shards_are_cut(run, monkeypatch):
    config, units = run
    monkeypatch.setattr("sweeps.folder.writer.FILE_BYTES", 300)
    write(config, units[0]).commit()
    run = sweeps.open(config.run.dir)
    assert len(run.files("activations")) > 2
    values = [r.tensor[0, 0].item() for r in run.query(pool="mean", layer=1)]
    assert values == [float(n + 1) for n in range(8)]


def test_tensor_files_are_safetensors(tmp_path):
    parts = {"a": [torch.arange(6.0).reshape(2, 3).bfloat16(), torch.ones(1, 3).bfloat16()], "b": [torch.zeros(0, 2)],
             "c": [torch.arange(10.0).reshape(5, 2)[::2]]}  # fmt: skip
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"".join(bytes(piece) for piece in tensors.encode(parts, {"k": "v"})))
    mapped = tensors.open_file(open_store(tmp_path), "x.safetensors")
    for key, value in load_file(path).items():
        assert torch.equal(value, torch.cat(parts[key]))
        assert torch.equal(mapped.rows(key, 0, value.shape[0]), value)
    mapped.rows("a", 0, 1).zero_()
    assert load_file(path)["a"][0, 1] == 1, "a private page, not the file"
    with pytest.raises(KeyError):
        mapped.rows("a", 2, 4)
    with pytest.raises(ValueError, match="differ"):
        list(tensors.encode({"a": [torch.ones(1, 2), torch.ones(1, 3)]}))


def test_names_cannot_leave_the_folder(run):
    config, units = run
    name = "../../../etc/" + "ü" * 20
    writer = UnitWriter(config.run.dir, units[0], {"bob": name})
    writer.add_cell(units[0].cells[0], [talk.said("bob", "x")], talk.records(0, 1.0))
    writer.commit()
    run = sweeps.open(config.run.dir)
    root = run.root.resolve()
    assert all(root in p.resolve().parents for t in ("records", "activations") for p in map(type(root), run.files(t)))
    assert run.table("records")["model"].to_pylist() == [name] * 3
    assert run.query(model=name)[0].tensor.shape == (1, 8)


def test_trunks_are_read_back_verbatim(run):
    config, units = run
    write(config, units[0]).commit()
    trunk = units[0].trunks[1]
    found = RunFolder(config.run.dir).trunk(trunk.id)
    expected = talk.said("alice", f"t {trunk.id}", 1)
    assert found[1] == expected and found[1].fed == expected.fed
    with pytest.raises(KeyError):
        RunFolder(config.run.dir).trunk("unknown")
