"""A whole run on an object store, over real HTTP: the same cells as on a disk, whatever the store does."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from sweeps import run
from sweeps.driver import driver, entry, progress
from sweeps.folder import commits, status
from sweeps.folder.store import Remote, open_store
from sweeps.folder.verify import verify
from tests.support import apart
from tests.support.small import contents, same, settings


def small(model, *, seeds=2, **changes):
    """Two items, eight cells, two units."""
    return settings(model, num_items=2, seeds=seeds, **changes)


@pytest.fixture(scope="module")
def undisturbed(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    assert entry.run(small(model), folder) == 0
    return contents(folder)


@pytest.fixture
def url(faulty, tmp_path):
    return f"s3://runs/{tmp_path.name}"


def is_whole(url, undisturbed):
    assert verify(url, deep=True).ok
    same(contents(url), undisturbed)


def one_trunk_a_unit(model, url):
    return entry.run(small(model, unit_cells=2), url)


@pytest.mark.slow
def test_a_killed_driver_is_continued_there_by_the_same_command(model, url, undisturbed):
    assert apart.wait(apart.start(one_trunk_a_unit, model, url, SWEEPS_FAILPOINTS="writer.committed=kill")) == -9
    first = {commit.unit: commit for commit in commits.list_commits(url)}
    assert 1 <= len(first) < 4, "two units are written side by side: the other one may be in before the kill"
    assert one_trunk_a_unit(model, url) == 0
    after = {commit.unit: commit for commit in commits.list_commits(url)}
    assert first == {unit: after[unit] for unit in first}, "what was committed stands"
    is_whole(url, undisturbed)
    assert [e["event"] for e in status.events(url)].count("complete") == 1
    assert one_trunk_a_unit(model, url) == 0
    assert entry.run(small(model, seeds=3, unit_cells=2), url) == 0
    assert run.open(url).counts == {"done": 12, "failed": 0, "pending": 0}
    assert entry.run(small(model, seeds=1), url) == 5


def every(number, fault, method="PUT", times=4):
    """This fault at every so many requests of one method, so many times (each costs its client half a second)."""
    seen = []

    def choose(_, given, path, headers):
        seen.extend([path] * (given == method))
        met = given == method and len(seen) % number == 0 and len(seen) <= number * times
        return fault if met else None

    return choose


@pytest.mark.slow
@pytest.mark.parametrize("fault", [every(4, "503"), every(20, "503", "GET"), every(3, "lost"), every(9, "hang", times=2)],
                         ids=["503 to a put", "503 to a get", "lost replies", "silence"])  # fmt: skip
def test_a_store_that_fails_now_and_then_changes_nothing(faulty, model, url, undisturbed, fault):
    with faulty.failing(fault):
        assert entry.run(small(model), url) == 0
        assert sum(faulty.met.values()) >= 2
    is_whole(url, undisturbed)
    assert run.open(url).table("failures").num_rows == 0


def test_a_lost_reply_to_a_commit_is_a_success(faulty, model, url, undisturbed):
    """Every commit is stored and its reply lost: the client's second put is refused, and what stands decides."""
    lost = set()

    def fault(number, method, path, headers):
        if method == "PUT" and "/_commits/" in path and path not in lost:
            assert headers["If-None-Match"] == "*"
            lost.add(path)
            return "lost"
        return None

    with faulty.failing(fault):
        assert entry.run(small(model), url) == 0
    assert len(lost) == 2 and verify(url, deep=True).notes == []
    is_whole(url, undisturbed)


def test_a_store_that_is_away_ends_the_run_in_bounded_time_and_the_same_command_continues(
    faulty, model, url, undisturbed, monkeypatch, capsys
):  # fmt: skip
    monkeypatch.setattr(driver, "MAX_FOLDER_ERRORS", 2)

    def away(number, method, path, headers):
        return "503" if method == "PUT" and path.startswith(f"/{Remote(url).path}/messages/") else None

    with faulty.failing(away):
        assert entry.run(small(model), url) == 1
    said = capsys.readouterr().err
    assert "the run folder failed 2 times without a commit between" in said and "come back later" in said
    assert list(commits.list_commits(url)) == [], "nothing was split or failed for it"
    assert entry.run(small(model), url) == 0
    is_whole(url, undisturbed)


def test_a_store_that_is_away_at_the_start_is_one_line(faulty, model, url, capsys):
    with faulty.failing(lambda *request: "503"):
        assert entry.run(small(model), url) == 5
    said = capsys.readouterr().err
    assert "come back later" in said and "Traceback" not in said


def test_a_long_silence_is_said(faulty, url, monkeypatch, capfd):
    monkeypatch.setattr("sweeps.folder.objects.SLOW_S", 0.1)
    with faulty.failing(every(1, "hang", times=99)), pytest.raises(OSError, match=r"a\.json"):
        open_store(url).write_new("a.json", b"1")
    assert f"no answer for 0 s about {url}/a.json" in capfd.readouterr().err


def test_the_same_content_twice_is_one_success_and_other_content_is_refused(faulty, url):
    open_store(url).write_new("a.json", b"1")
    open_store(url).write_new("a.json", b"1")
    with pytest.raises(FileExistsError):
        open_store(url).write_new("a.json", b"2")


def test_events_are_put_in_parts(faulty, url, monkeypatch):
    monkeypatch.setattr(progress, "EVENT_PART_BYTES", 500)
    sent = []

    def watch(number, method, path, headers):
        if method == "PUT":
            sent.append(int(headers["Content-Length"]))

    with faulty.failing(watch):
        for first in (0, 20):
            log = progress.Progress(url, "none", interval_s=0.0)
            for number in range(first, first + 20):
                log.event("tick", number=number)
                log.update(progress.Snapshot(), now=number % 2 == 0)
            log.close()
    assert [e["number"] for e in status.events(url)] == list(range(40))
    parts = list(Remote(url).glob("events-*.jsonl"))
    assert len(parts) > 5 and max(sent) < 900, "no upload grows with the run"
    assert json.loads(parts[0].read_text().splitlines()[0])["number"] == 0


def test_failed_cells_are_retried_there(model, url):
    from tests.support.small import Switch

    Switch.fail_item = "i1"
    try:
        assert entry.run(small(model), url) == 3
    finally:
        Switch.fail_item = None
    again = small(model)
    assert entry.run(replace(again, run=replace(again.run, retry_failed=True)), url) == 0
    assert verify(url, deep=True).ok and run.open(url).counts["done"] == 8
