"""A folder from a stranger: links, pipes and devices in it are refused, and nothing outside it changes or is waited for."""

import json
import os
import shutil
import signal
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import sweeps
from interlens.errors import InterlensError
from sweeps.cli import main
from sweeps.compose import from_plain
from sweeps.driver import entry
from sweeps.errors import Damaged
from sweeps.folder import names, rows, tensors
from sweeps.folder.store import MemoryStore, open_store
from tests.support import talk
from tests.support.small import settings
from tests.sweeps.folder.conftest import SMALL


def fresh(made, above):
    """A copy of the run in `above`, beside a folder that is nobody's business."""
    shutil.copytree(made, above / "run")
    (above / "outside").mkdir()
    (above / "outside" / "mine").write_text("mine")
    return above / "run"


@pytest.fixture
def folder(made, tmp_path):
    fresh(made, tmp_path)
    (tmp_path / "outside" / "mine").unlink()

    def too_long(*_):
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(120)
    yield tmp_path / "run"
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def seen(outside):
    """Every name below a folder, with what would change if it were written, replaced or touched."""
    found = {}
    for path in [outside, *sorted(outside.rglob("*"))]:
        about = path.lstat()
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else None
        found[str(path)] = (about.st_ino, about.st_mode, about.st_mtime_ns, about.st_size, content)
    return found


def everything(folder, model, whole=True):
    """The exit codes of all that a user does with a folder (`whole`: captures and an extension, which load models, too)."""
    run = str(folder)
    capture = ["capture", run, "layers=0", "sites=mlp", "pool=mean", "run.progress=none"]
    commands = [
        ["status", run], ["show", run, "0"], ["verify", run], ["gc", run], ["report", run], ["aggregate", run],
        ["aggregate", run, "name=moments"], ["export", run, str(folder.parent / "x.npz")],
        ["export", run, str(folder.parent / "x.gguf")], ["compare", run, run], *([capture] if whole else []),
        ["verify", run, "--deep", "--reopen"],
    ]  # fmt: skip
    codes = [main(arguments) for arguments in commands]
    more = {**SMALL, "num_items": 2 if whole else 1}
    return {*codes, entry.run(settings(model, **more), folder), main(["gc", run])}


def places(root):
    """Every kind of name in a folder, files and folders."""
    (capture,) = (root / "captures").iterdir()
    first = {table: min((root / table).rglob("u*")) for table in ("messages", "records", "activations", "outcomes")}
    return {
        **{name: root / name for name in (
            "run.json", "config-0.yaml", "progress.json", "events.jsonl", "messages", "records", "activations", "captures",
            "report", "aggregates", "inputs", "plan", "_commits", "_lease", "_tmp", "report/index.html",
            "aggregates/outcomes.json", "aggregates/directions.safetensors", "inputs/items-0.jsonl", "plan/part-0.parquet",
            "_commits/u000000.json", "messages/u000000-deadbeef.parquet",
        )},
        "a capture": capture, "a capture's events": capture / "events.jsonl",
        "a capture's commits": capture / "_commits", **first,
    }  # fmt: skip


PLACES = (
    "run.json", "config-0.yaml", "progress.json", "events.jsonl", "messages", "records", "activations", "captures", "report",
    "aggregates", "inputs", "plan", "_commits", "_lease", "_tmp", "report/index.html", "aggregates/outcomes.json",
    "aggregates/directions.safetensors", "inputs/items-0.jsonl", "plan/part-0.parquet", "_commits/u000000.json",
    "messages/u000000-deadbeef.parquet", "a capture", "a capture's events", "a capture's commits", "outcomes",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_a_link_anywhere_changes_nothing_outside(folder, model, place, capsys):
    path, outside = places(folder)[place], folder.parent / "outside"
    aside = outside / path.name
    shutil.move(path, aside)
    path.symlink_to(aside)
    before = seen(outside)
    codes = everything(folder, model)
    assert seen(outside) == before
    assert codes <= {0, 1, 3, 4, 5} and "Traceback" not in "".join(capsys.readouterr())


@pytest.mark.parametrize("place", ["messages", "events.jsonl", "aggregates", "report", "captures", "_tmp"])
def test_a_link_to_what_is_not_there_makes_nothing_there(folder, model, place):
    path, outside = places(folder)[place], folder.parent / "outside"
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    path.symlink_to(outside / "new")
    for arguments in (["report"], ["aggregate"], ["gc"], ["verify", "--deep", "--reopen"]):
        assert main([arguments[0], str(folder), *arguments[1:]]) in (0, 1, 5)
    entry.run(settings(model, **SMALL), folder)
    assert list(outside.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("place", [p for p in PLACES if "." in p or p in ("outcomes", "a capture's events")])
def test_a_pipe_is_refused_and_nothing_waits_for_it(folder, model, place, capsys):
    path = places(folder)[place]
    path.unlink()
    os.mkfifo(path)
    codes = everything(folder, model, whole=False)
    assert codes <= {0, 1, 3, 4, 5} and "Traceback" not in "".join(capsys.readouterr())


def test_each_command_says_which_link_it_met(folder, capsys):
    shutil.move(folder / "messages", folder.parent / "outside" / "messages")
    (folder / "messages").symlink_to(folder.parent / "outside" / "messages")
    for arguments in (["gc"], ["report"], ["verify", "--reopen"]):
        capsys.readouterr()
        assert main([arguments[0], str(folder), *arguments[1:]]) == 1
        assert "messages" in (said := "".join(capsys.readouterr())) and "is a symbolic link" in said


def test_events_are_not_appended_to_a_file_with_a_second_name_elsewhere(folder, model):
    twin = folder.parent / "outside" / "startup.sh"
    os.link(folder / "events.jsonl", twin)
    before = seen(twin.parent)
    assert entry.run(settings(model, **SMALL), folder) == 0
    assert seen(twin.parent) == before
    assert len((folder / "events.jsonl").read_bytes()) > twin.stat().st_size, "its own copy goes on"


def test_an_export_writes_through_no_name_that_could_be_known(folder):
    out, outside = folder.parent / "x.parquet", folder.parent / "outside" / "mine"
    outside.write_text("mine")
    for planted in (".x.parquet.part", "x.parquet.part", "x.parquet.tmp"):
        (folder.parent / planted).symlink_to(outside)
    assert main(["export", str(folder), str(out)]) == 0
    assert outside.read_text() == "mine" and out.is_file() and not out.is_symlink()


@pytest.mark.parametrize("field", ["patch", "replay", "direction"])
def test_other_runs_are_read_as_carefully(folder, model, tmp_path, field, capsys):
    shutil.move(folder / "messages", tmp_path / "outside" / "messages")
    (folder / "messages").symlink_to(tmp_path / "outside" / "messages")
    shutil.move(folder / "aggregates", tmp_path / "outside" / "aggregates")
    (folder / "aggregates").symlink_to(tmp_path / "outside" / "aggregates")
    edit = {"participants": ["bob"], "layers": [1]}
    changes = {
        "patch": {"intervention": [{**edit, "kind": "patch", "from": f"run:{folder}", "tokens": "prompt"}]},
        "replay": {"scenario__replay": f"run:{folder}"},
        "direction": {"intervention": [{**edit, "direction": f"run:{folder}:residual:1", "coef": 1.0}]},
    }[field]  # fmt: skip
    before = seen(tmp_path / "outside")
    try:
        assert entry.run(settings(model, **{**SMALL, "aggregate": {}}, **changes), tmp_path / "new") in (1, 5)
        said = capsys.readouterr().err
    except InterlensError as error:
        said = str(error)
    assert "is a symbolic link" in said, said
    assert seen(tmp_path / "outside") == before


# ---- what is in a file


DEEP = b"[" * 100_000 + b"]" * 100_000
BOMB = b"a: &a [x, x, x, x, x, x, x, x, x, x]\n" + b"\n".join(
    b"%c: &%c [%s]" % (98 + n, 98 + n, b", ".join([b"*%c" % (97 + n)] * 10)) for n in range(12))  # fmt: skip
ODD = [{"dtype": "F32", "shape": [-1, 4], "data_offsets": [0, 16]}, {"dtype": "F32", "shape": "ab", "data_offsets": [0, 8]},
       {"dtype": "F32", "shape": [1 << 60, 4], "data_offsets": [0, 16]}, {"dtype": 3, "shape": [1, 4]}, [], None,
       {"dtype": "F32", "shape": [1, 4], "data_offsets": [0, "x"]}]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["run.json", "config-0.yaml", "progress.json", "events.jsonl", "aggregates/outcomes.json",
             "_commits/u000000.json", "inputs/items-0.jsonl"]
)  # fmt: skip
@pytest.mark.parametrize("content", [DEEP, BOMB, b"", b"\xff\x00", b"[1]", b'{"event": 3}\n{"event": "failed"}\n', b"1e999"],
                         ids=["deep", "aliases", "empty", "bytes", "list", "events", "number"])  # fmt: skip
def test_a_text_that_is_not_ours_is_one_line(folder, name, content, capsys):
    (folder / name).write_bytes(content)
    for arguments in (["status"], ["report"], ["verify", "--deep"], ["aggregate"], ["gc"]):
        capsys.readouterr()
        assert main([arguments[0], str(folder), *arguments[1:]]) in (0, 1)
        assert capsys.readouterr().err.count("\n") <= 1


@pytest.mark.parametrize("entry_", ODD, ids=range(len(ODD)))
def test_a_header_of_tensors_that_is_not_ours_is_damage(tmp_path, entry_):
    header = json.dumps({"a": entry_}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    with pytest.raises(Damaged, match="cannot be read"):
        tensors.open_file(open_store(tmp_path), "x.safetensors")


def test_phases_of_more_tokens_than_there_are_take_no_memory():
    row = rows.message_row(talk.said("bob", "hi"), 0)
    for runs in ([(0, 10**12)], [(0, 10**12), (10**12, 5)]):
        phases = [{"phase": "answer", "start": start, "end": end} for start, end in runs]
        with pytest.raises(Damaged, match="phases of more tokens"):
            rows.message({**row, "phases": phases})


def test_a_damaged_result_says_how_it_is_made_again(folder, capsys):
    result = folder / "aggregates" / "outcomes.json"
    whole = result.read_bytes()
    result.write_bytes(whole[:40])
    assert main(["report", str(folder)]) == 1
    assert f"sweeps aggregate {folder} name=outcomes" in capsys.readouterr().err
    assert main(["aggregate", str(folder), "name=outcomes"]) == 0 and result.read_bytes() == whole


# ---- the store itself


NAMES = ["../x", "a/../../x", "/etc/passwd", "a//b", "./a", "a/.", "..", "a\0b", "/".join("a" * 40)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_a_name_that_leads_out_is_refused_by_every_verb(tmp_path, kind, name):
    store = MemoryStore() if kind == "memory" else open_store(tmp_path / "run")
    store.write_new("a/b", b"1")
    verbs = [lambda: store.write_new(name, b""), lambda: store.replace(name, b""), lambda: store.delete(name),
             lambda: store.read(name), lambda: store.open(name), lambda: store.exists(name), lambda: store.size(name),
             lambda: store.entries(name), lambda: store.walk(name), lambda: store.sub(name), lambda: store.arrow(name),
             lambda: store.read_range(name, 0, 1)]  # fmt: skip
    for verb in verbs:
        with pytest.raises(Damaged):
            verb()
    assert not (tmp_path / "x").exists()


def test_a_store_in_memory_keeps_the_guarantees():
    store = MemoryStore()
    store.write_new("a/b.json", b"1")
    with pytest.raises(FileExistsError):
        store.write_new("a/b.json", b"2")
    store.replace("c", b"1")
    store.replace("c", b"2")
    assert (store.read("a/b.json"), store.read("c"), store.entries(), store.walk()) == (
        b"1", b"2", ["a", "c"], ["a/b.json", "c"])  # fmt: skip
    store.delete("c")
    store.delete("c")
    assert not store.exists("c") and MemoryStore().entries() == []
    with pytest.raises(FileNotFoundError):
        store.read("c")


class Careless(MemoryFileSystem):
    """An object store that knows no conditional put: what is put last stands."""

    protocol = ("careless",)
    store, pseudo_dirs = {}, [""]

    def _open(self, path, mode="rb", **options):
        return super()._open(path, mode.replace("x", "w"), **options)


SCRIPTED = {
    "scenario": {"items": [{"id": "a"}], "participants": {"ann": {"kind": "scripted", "lines": ["hi"]}},
                 "branch": {"turns": 1}},
    "cluster": {"executor": "inline"}, "run": {"progress": "none"},
}  # fmt: skip


def test_a_store_where_a_second_put_wins_is_refused_at_the_start(capsys):
    fsspec.register_implementation("careless", Careless, clobber=True)
    assert entry.run(from_plain(SCRIPTED), "careless://bucket/run") == 5
    assert "does not refuse a name that exists" in capsys.readouterr().err
    assert not any(name.endswith((names.RUN, ".probe")) for name in Careless.store)


def test_a_folder_that_would_be_gone_is_refused(capsys):
    assert entry.run(from_plain(SCRIPTED), "memory://x") == 5
    assert "gone when this process ends" in capsys.readouterr().err


def test_a_disk_takes_hard_links_where_files_go_or_is_refused(tmp_path, monkeypatch, capsys):
    real = os.link

    def only_in_tmp(source, target, **options):
        if os.readlink(f"/proc/self/fd/{options['dst_dir_fd']}").endswith(("_tmp", "_lease")):
            return real(source, target, **options)
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", only_in_tmp)
    assert entry.run(from_plain(SCRIPTED), tmp_path / "run") == 5
    assert "no hard links" in capsys.readouterr().err


def test_file_urls_and_homes_are_paths(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert (
        entry.run(from_plain(SCRIPTED), "~/mine") == 0
        and entry.run(from_plain(SCRIPTED), f"file://{tmp_path}/two") == 0
    )
    assert sweeps.open("~/mine").counts["done"] == 1 and isinstance(sweeps.open(f"file://{tmp_path}/two").root, Path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "two"]
    assert entry.run(from_plain(SCRIPTED), "file:///") == 5
    assert "is no run folder and not empty" in capsys.readouterr().err
