"""Every kind of file of a finished run, changed at random, through every command: one line, and nothing outside changes."""

import contextlib
import io
import json
import os
import random
import shutil
import time
import traceback

import pytest

from sweeps.cli import main
from tests.sweeps.folder.test_hostile import fresh, seen

VALUES = [None, True, -1, 1e308, 10**30, "", "../x", "\x1b[2J", [], {}, [[]], {"": None}, "x" * 10_000]


def flipped(path, chance):
    data = bytearray(path.read_bytes())
    for _ in range(chance.choice((1, 1, 8, 64))):
        if data:
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def resized(path, chance):
    data = path.read_bytes()
    at = chance.randrange(len(data) + 1)
    path.write_bytes(chance.choice((data[:at], data + os.urandom(100), data[:at] + data[at // 2 :], b"", data + data)))


def retyped(path, chance):
    """Another value at a random place of a JSON file; elsewhere another file's content."""
    try:
        whole = json.loads(path.read_bytes())
    except ValueError:
        return flipped(path, chance)
    at = whole
    while isinstance(at, (dict, list)) and at:
        key = chance.choice(list(at)) if isinstance(at, dict) else chance.randrange(len(at))
        if not isinstance(at[key], (dict, list)) or not at[key] or chance.random() < 0.3:
            at[key] = chance.choice(VALUES)
            break
        at = at[key]
    path.write_text(json.dumps(whole))


def replaced(path, chance):
    """A link out, a pipe, a folder, or another file of the run in its place."""
    root = next(p for p in path.parents if p.name == "run")
    others = [p for p in root.rglob("*") if p.is_file() and p != path]
    path.unlink()
    outside = root.parent / "outside" / "mine"
    for make in chance.sample((lambda: path.symlink_to(outside), lambda: os.mkfifo(path), path.mkdir,
                               lambda: shutil.copyfile(chance.choice(others), path), lambda: None), 1):  # fmt: skip
        make()


def renamed(path, chance):
    path.rename(path.with_name(chance.choice((f"{path.name}.bak", f"{path.stem}-7{path.suffix}", "a b.parquet", "0"))))


CHANGES = (flipped, resized, retyped, replaced, renamed)


def commands(root):
    run = str(root)
    return [
        ["status", run], ["show", run, "0"], ["verify", run], ["verify", run, "--deep"], ["gc", run, "--dry-run"],
        ["report", run], ["aggregate", run], ["aggregate", run, "name=moments"], ["export", run, str(root.parent / "x.npz")],
        ["compare", run, run], ["gc", run], ["verify", run, "--deep", "--reopen"],
    ]  # fmt: skip


def wrong(root, chance):
    """What a command did that it must not, after some random changes; None where all was well."""
    files = sorted(p for p in root.rglob("*") if p.is_file() and p.parent.name != "_lease")  # there, one waits a minute
    done = []
    for path in chance.sample(files, chance.choice((1, 1, 2))):
        change = chance.choice(CHANGES)
        done.append(f"{change.__name__} {path.relative_to(root)}")
        change(path, chance)
    before = seen(root.parent / "outside")
    for arguments in commands(root):
        said, begun = io.StringIO(), time.monotonic()
        try:
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
                code = main(arguments)
        except Exception:
            return f"{done}: {arguments[0]}: {traceback.format_exc()}"
        if code not in (0, 1, 3, 4, 5) or (code and said.getvalue().count("\n") > 1):
            return f"{done}: {arguments[0]}: {code} {said.getvalue()}"
        if time.monotonic() - begun > 60 or seen(root.parent / "outside") != before:
            return f"{done}: {arguments[0]} took long, or changed what lies outside"
    return None


@pytest.mark.soak
def test_changed_folders_are_told_in_one_line(made, tmp_path):
    deadline = time.monotonic() + float(os.environ.get("SOAK_S", 60))
    found, number = {}, int(os.environ.get("SOAK_SEED", 0))
    while time.monotonic() < deadline and len(found) < 20:
        root = fresh(made, tmp_path / f"{number}")
        if (problem := wrong(root, random.Random(number))) is not None:
            found.setdefault(problem.strip().splitlines()[-1], f"seed {number}: {problem}")
        shutil.rmtree(tmp_path / f"{number}", ignore_errors=True)
        number += 1
    assert not found, "\n\n".join(found.values())
