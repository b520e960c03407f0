"""Laws of the store: complete or absent, created once, the same on a disk and on S3."""

import json
import os
import sys
import threading

import pyarrow.parquet as pq
import pytest
import torch

import sweeps
from sweeps import errors
from sweeps.compose import from_plain
from sweeps.driver import enter
from sweeps.errors import ConfigError
from sweeps.folder import commits, files, garbage
from sweeps.folder.objects import ObjectStore
from sweeps.folder.plan_reader import PlanFile
from sweeps.folder.reader import RunFolder
from sweeps.folder.store import Remote, open_store
from sweeps.folder.verify import verify
from sweeps.folder.writer import UnitWriter
from sweeps.plan.expand import expand
from tests.support import talk
from tests.sweeps.folder.test_run import answer


@pytest.fixture
def s3(faulty):
    """The URL of a bucket of a real S3 server."""
    return "s3://runs"


@pytest.fixture(params=["disk", "s3"])
def root(request, tmp_path):
    if request.param == "disk":
        return str(tmp_path / "run")
    return f"{request.getfixturevalue('s3')}/{tmp_path.name}"


def test_a_name_is_created_once(root):
    open_store(root).write_new("a/b.json", b'{"n":1}')
    with pytest.raises(FileExistsError):
        open_store(root).write_new("a/b.json", b'{"n":2}')
    assert files.read_json(root, "a/b.json") == {"n": 1}
    open_store(root).replace("c.json", b'{"n":1}')
    open_store(root).replace("c.json", b'{"n":2}')
    assert files.read_json(root, "c.json") == {"n": 2}
    open_store(root).delete("c.json")
    open_store(root).delete("c.json")
    with pytest.raises(FileNotFoundError):
        files.read_json(root, "c.json")


def test_a_write_that_breaks_leaves_no_name(root):
    with pytest.raises(RuntimeError, match="half way"), open_store(root).create("a.bin") as out:
        out.write(b"x" * 100)
        raise RuntimeError("half way")
    assert not (open_store(root).root / "a.bin").exists()
    assert [p for p in open_store(root).root.rglob("*") if p.is_file()] == []


def test_of_many_writers_one_wins(root):
    outcome = []

    def write(attempt):
        commit = commits.Commit(unit="u000000", attempt=attempt, cells=tuple("abc"))
        outcome.append((commits.write_commit(root, commit), attempt))

    threads = [threading.Thread(target=write, args=(f"{n:08x}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = [attempt for said, attempt in outcome if said == "won"]
    assert commits.read_commit(root, "u000000").attempt == winner and len(outcome) == 8


def test_a_lost_reply_is_still_a_success(s3, tmp_path, monkeypatch):
    """The put succeeds and its answer never arrives: the retry finds its own commit."""
    root = f"{s3}/{tmp_path.name}"
    real, calls = ObjectStore.write_new, []

    def reply_lost(*arguments):
        real(*arguments)
        calls.append(arguments)
        raise TimeoutError("no answer")

    monkeypatch.setattr(ObjectStore, "write_new", reply_lost)
    assert commits.write_commit(root, commits.Commit(unit="u000000", attempt="aaaaaaaa")) == "won" and len(calls) == 1
    monkeypatch.setattr(ObjectStore, "write_new", real)
    assert commits.write_commit(root, commits.Commit(unit="u000000", attempt="bbbbbbbb")) == "lost"

    def never_arrives(*arguments):
        calls.append(arguments)
        raise TimeoutError("no answer")

    monkeypatch.setattr(ObjectStore, "write_new", never_arrives)
    with pytest.raises(TimeoutError):
        commits.write_commit(root, commits.Commit(unit="u000001", attempt="aaaaaaaa"))
    assert len(calls) == 4 and commits.read_commit(root, "u000001") is None


def test_commits_are_listed_in_order_and_nothing_else_is(root):
    names = ["u000010", "u000002", "u000002.0", "u000002.1", "u000002.1.0", "u000002.r", "u000003"]
    for name in names:
        commits.write_commit(root, commits.Commit(unit=name, attempt="aaaaaaaa"))
    for foreign in (".DS_Store", "notes.json", "u1-copy.json", "u000002.json.bak"):
        open_store(root).write_new(f"_commits/{foreign}", b"{")
    assert [c.unit for c in commits.list_commits(root)] == [
        "u000002", "u000002.0", "u000002.1", "u000002.1.0", "u000002.r", "u000003", "u000010",
    ]  # fmt: skip


def test_a_whole_run_anywhere(root, tmp_path):
    config = talk.config(tmp_path, run={"dir": root})
    assert enter.enter(config, root).num_cells == 24
    units = list(PlanFile(root).units())
    assert units == list(expand(config))
    for unit in units[:2]:
        writer = UnitWriter(root, unit, {"alice": "tiny", "bob": "tiny"})
        for trunk in unit.trunks:
            writer.add_trunk(trunk.id, [talk.said("alice", f"t {trunk.id}")])
        for n, cell in enumerate(unit.cells):
            writer.add_cell(cell, [talk.said("bob", "so", 1)], answer(1, float(n)), {"words": n}, start=1)
        assert writer.commit() == "won"
    run = sweeps.open(root)
    assert run.counts == {"done": 16, "failed": 0, "pending": 8}
    cell = units[0].cells[3]
    assert [m.content for m in run.messages(cell.id)] == [f"t {cell.trunk}", "so"]
    assert run.messages(cell.id)[1].fed == talk.said("bob", "so", 1).fed
    assert torch.equal(run.at(cell=cell.id, layer=3), torch.full((1, 8), 6.0))
    x, table = run.vectors(layer=1)
    assert x[:, 0].tolist() == [float(n + 1) for n in range(8)] * 2 and set(table["framing"].to_pylist()) == {
        "warm",
        "cold",
    }
    assert run.outcomes().num_rows == 16
    assert RunFolder(root).trunk(cell.trunk)[0].content == f"t {cell.trunk}"
    found = verify(root, deep=True)
    assert found.ok and found.counts["records"] == 48
    open_store(root).write_new("messages/u000000-deadbeef.parquet", b"late")
    assert garbage.collect(root, leased=True) == ["messages/u000000-deadbeef.parquet"]
    assert enter.enter(config, root).state == "same"
    larger = talk.config(
        tmp_path, run={"dir": root}, grid={"framing": {"warm": "Be warm.", "cold": "Be cold.", "x": "y"}}
    )
    assert enter.enter(larger, root).new_cells == 12
    assert sweeps.open(root).counts == {"done": 16, "failed": 0, "pending": 20}
    with pytest.raises(errors.RunRefused, match="holds another run"):
        enter.enter(config, root)


def test_file_systems_without_links_are_refused_at_the_start(tmp_path, monkeypatch):
    def no_links(*arguments, **options):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    config = talk.config(tmp_path)
    with pytest.raises(errors.RunRefused, match="no hard links"):
        enter.enter(config, config.run.dir)


def test_remote_paths_behave_like_paths(s3):
    base = open_store(f"{s3}/paths").root
    assert isinstance(base, Remote) and str(base / "a/b.tar.gz") == "s3://runs/paths/a/b.tar.gz"
    found = base / "a" / "b.tar.gz"
    assert (found.name, found.stem, found.suffix, found.parent.name) == ("b.tar.gz", "b.tar", ".gz", "a")
    assert found.relative_to(base) == "a/b.tar.gz" and not found.exists() and list(base.iterdir()) == []
    open_store(base).write_new("a/b.tar.gz", b"12345")
    assert found.exists() and found.is_file() and (base / "a").is_dir() and found.stat().st_size == 5
    assert list(base.rglob("*")) == [found] and list((base / "a").glob("*.gz")) == [found]
    assert found.read_range(1, 3) == b"23"


# ---- what is in a folder is data


HOSTILE = ["../../up", "/etc/passwd", "a/b", "x" * 10_000, "аlice", ".", "..", "con\x00", "a\nb", "🙂", "a%2Fb"]


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_names_from_data_never_leave_the_folder(tmp_path, name):
    config = talk.config(tmp_path, scenario={**talk.SCENARIO, "items": [{"id": name, "topic": name}]})
    enter.enter(config, config.run.dir)
    (unit,) = PlanFile(config.run.dir).units()
    writer = UnitWriter(config.run.dir, unit, {"bob": "tiny"})
    for trunk in unit.trunks:
        writer.add_trunk(trunk.id, [talk.Message(name, name)], [])
    for cell in unit.cells:
        message = talk.Message(name, name, {name: name})
        writer.add_cell(cell, [message], [], {name: name})
    writer.commit()
    run = sweeps.open(config.run.dir)
    assert [m.content for m in run.messages(unit.cells[0].id)] == [name, name]
    inside = tmp_path / "run"
    assert all(inside in p.resolve().parents for p in inside.rglob("*"))
    assert {p.name for p in tmp_path.iterdir()} == {"run", "tiny"}


@pytest.mark.parametrize("name", ["../x", "a/b", "", "..", "x" * 100, "аlice", "a\nb"])
def test_such_names_are_refused_where_users_choose_them(tmp_path, name):
    people = {name: {"model": "tiny"}, "bob": {"model": "tiny"}}
    with pytest.raises(ConfigError, match="cannot name a participant"):
        talk.config(tmp_path, scenario={**talk.SCENARIO, "participants": people}, capture=None)
    models = {name: {"source": "hub/x"}, "tiny": {"source": "hub/y"}}
    with pytest.raises(ConfigError, match="cannot name a model"):
        talk.config(tmp_path, models=models, capture=None)


def test_nothing_in_a_folder_is_run(tmp_path):
    """YAML tags, pickles and analyzers in a folder are text: opening and verifying it starts nothing."""
    config = talk.config(tmp_path)
    enter.enter(config, config.run.dir)
    planted = tmp_path / "run" / "config-0.yaml"
    planted.write_text(planted.read_text() + f"\nx: !!python/object/apply:os.system ['touch {tmp_path}/pwned']\n")
    with pytest.raises(Exception, match="python/object"):
        _ = sweeps.open(config.run.dir).config
    assert not (tmp_path / "pwned").exists()


def test_code_that_a_folder_names_is_never_imported(tmp_path, monkeypatch, capsys):
    """An aggregate's kind and an analyzer may be import paths, in the user's own configuration only."""
    from sweeps.cli import main
    from sweeps.driver import entry as driver_entry

    people = {"alice": {"kind": "scripted", "lines": ["hello"]}}
    plain = {
        "scenario": {"items": [{"id": "a"}], "participants": people, "branch": {"turns": 1}},
        "cluster": {"executor": "inline"}, "run": {"progress": "none", "dir": str(tmp_path / "run")},
    }  # fmt: skip
    config = from_plain(plain)
    assert driver_entry.run(config, config.run.dir) == 0
    planted = tmp_path / "run" / "config-0.yaml"
    evil = f"touch {tmp_path}/pwned"
    content = {**files.read_yaml(tmp_path / "run", "config-0.yaml")}
    content["aggregate"] = [{"name": evil, "options": {"kind": "os:system"}}]
    content["scenario"]["analyzers"] = ["antigravity:nothing"]
    planted.write_bytes(files.dump_yaml(content))
    plan = tmp_path / "run" / "plan" / "part-0.parquet"  # made by somebody who knows that it holds the hash of settings
    pq.write_table(pq.read_table(plan).replace_schema_metadata(), plan)
    assert main(["aggregate", str(tmp_path / "run")]) == 1
    assert "nothing that a run folder names is imported" in capsys.readouterr().err
    assert main(["aggregate", str(tmp_path / "run"), f"name={evil}", "pool=mean"]) == 1
    escaping = {**content, "aggregate": [{"name": "../../out", "options": {"kind": "outcomes"}}]}
    planted.write_bytes(files.dump_yaml(escaping))
    assert main(["aggregate", str(tmp_path / "run")]) == 1 and not (tmp_path / "out.json").exists()
    planted.write_bytes(files.dump_yaml(content))
    for command in ("report", "status", "verify"):
        assert main([command, str(tmp_path / "run")]) == 0
    more = from_plain({**plain, "scenario": {**plain["scenario"], "branch": {"turns": 1, "seeds": 2}}})
    (tmp_path / "run" / "_commits" / "u000000.json").unlink()
    assert driver_entry.run(more, config.run.dir) == 0
    assert not (tmp_path / "pwned").exists() and "antigravity" not in sys.modules


def test_paths_in_a_commit_cannot_point_outside(tmp_path):
    config = talk.config(tmp_path)
    enter.enter(config, config.run.dir)
    (tmp_path / "secret").write_text("s")
    entry = {"path": "../secret", "table": "messages", "rows": 0, "bytes": 1, "sha256": ""}
    open_store(config.run.dir).write_new("_commits/u000000.json",
                    json.dumps({"unit": "u000000", "attempt": "aaaaaaaa", "files": [entry]}).encode())  # fmt: skip
    assert any("outside the run folder" in problem for problem in verify(config.run.dir).problems)
    with pytest.raises(errors.Damaged, match="outside"):
        sweeps.open(config.run.dir).files("messages")


def test_the_command_line_runs_on_s3(s3, tmp_path, monkeypatch, capsys):
    from sweeps.cli import main
    from tests.sweeps.commands.test_cli import SCRIPTED

    monkeypatch.chdir(tmp_path)
    url = f"{s3}/{tmp_path.name}"
    arguments = [
        *SCRIPTED,
        "scenario.analyzers=['sweeps.analyzers:enthusiasm']",
        "aggregate=outcomes",
        f"run.dir={url}",
    ]
    assert main(["run", *arguments]) == 0
    assert main(["run", *arguments]) == 0, "finished"
    assert main(["run", *arguments, "scenario.seed=4"]) == 5
    assert main(["verify", url, "--deep"]) == 0 and main(["status", url]) == 0 and main(["report", url]) == 0
    assert "4 of 4 cells committed" in capsys.readouterr().out
    assert (open_store(url).root / "report/index.html").is_file() and (
        open_store(url).root / "aggregates/outcomes.json"
    ).is_file()
    assert list(tmp_path.iterdir()) == [], "nothing here"


def test_secrets_never_reach_disk_or_terminal(tmp_path, monkeypatch, capsys):
    from sweeps.cli import main
    from tests.sweeps.commands.test_cli import SCRIPTED

    secret = "zq9-very-private-value"
    monkeypatch.setenv("SOME_API_KEY", secret)
    monkeypatch.chdir(tmp_path)
    module = tmp_path / "leaky.py"
    module.write_text(
        "import os\ndef leak(conversation):\n    key = os.environ['SOME_API_KEY']\n"
        "    raise RuntimeError(f'401: {key} and sk-abcdefghijklmnop1234 were refused')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["run", *SCRIPTED, "scenario.analyzers=['leaky:leak']"]) == 3
    failure = sweeps.open("runs/sweep").outcomes()["failed.leaky:leak"][0].as_py()
    assert "401: <SOME_API_KEY> and <secret> were refused" in failure and "leaky.py:4" in failure
    main(["status", "runs/sweep"])
    main(["report", "runs/sweep"])
    shown = capsys.readouterr()
    assert secret not in shown.out + shown.err and "sk-abc" not in shown.out + shown.err
    for path in (tmp_path / "runs").rglob("*"):
        assert not path.is_file() or secret.encode() not in path.read_bytes(), path
    api = {"ann": {"kind": "api", "model": "m", "provider": "openai", "base_url": f"http://me:{secret}@host/v1"}}
    with pytest.raises(ConfigError, match="holds a secret") as caught:
        talk.config(tmp_path, scenario={**talk.SCENARIO, "participants": api}, capture=None)
    assert secret not in str(caught.value)
    with pytest.raises(ConfigError, match="unknown key"):
        talk.config(tmp_path, scenario={**talk.SCENARIO, "participants": {"ann": {**api["ann"], "api_key": secret}}})
    for typed in (f"run.dir=s3://me:{secret}@bucket/x", f"scenario.opening=http://h/v1?key={secret}"):
        assert main(["run", *SCRIPTED, typed]) == 1
        assert secret not in "".join(capsys.readouterr())


def test_a_bad_outcome_stands_beside_its_conversation(tmp_path, monkeypatch):
    from sweeps.cli import main
    from tests.sweeps.commands.test_cli import SCRIPTED

    (tmp_path / "odd_outcome.py").write_text(
        "def odd(conversation):\n    return {'x': [] if conversation.row['id'] == 'a' else 1.5}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main(["run", *SCRIPTED, "scenario.analyzers=['odd_outcome:odd']"]) == 3
    run = sweeps.open("runs/sweep")
    assert run.counts == {"done": 4, "failed": 0, "pending": 0} and len(list(run.commits())) == 1
    rows = run.outcomes().to_pylist()
    assert [row["x"] for row in rows if row["item"] == "b"] == [1.5, 1.5]
    odd = [row for row in rows if row["item"] == "a"]
    assert [row["x"] for row in odd] == [None, None] and all(run.messages(row["cell"]) for row in odd)
    assert all("possible: numbers and strings" in row["failed.odd_outcome:odd"] for row in odd)
