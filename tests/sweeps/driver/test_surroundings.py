"""What surrounds a run fails: the disk of its log, the address of a cluster, the patience of who started it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sweeps.driver.executors.address import wait_for
from sweeps.errors import ConfigError
from sweeps.folder import commits
from tests.support import apart
from tests.support.fakes import config, items

ROOT = Path(__file__).parents[3]
SCRIPTED = [
    "scenario.items=[{id: a},{id: b},{id: c}]", "scenario.branch={turns: 1, seeds: 2}", "plan.unit_cells=2",
    "scenario.participants={ann: {kind: scripted, lines: [hi]}, ben: {kind: scripted, lines: [oh]}}",
]  # fmt: skip


def command(folder, *overrides, stdout=subprocess.PIPE):
    """`sweeps run` in a process of its own, over scripted talk."""
    typed = [sys.executable, "-m", "sweeps", "run", *SCRIPTED, f"run.dir={folder / 'run'}", *overrides]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}"}
    environment.pop("RAY_ADDRESS", None)
    return subprocess.Popen(typed, cwd=folder, env=environment, text=True, stdout=stdout, stderr=subprocess.PIPE)


def silent_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full is Linux's")
def test_a_log_that_cannot_be_written_ends_nothing(tmp_path):
    with open("/dev/full", "w") as full:
        process = command(tmp_path, "cluster=inline", "run.progress=plain", stdout=full)
        said = process.communicate(timeout=120)[1]
    assert process.returncode == 0, said
    assert sum(len(commit.cells) for commit in commits.list_commits(tmp_path / "run")) == 6


def test_an_address_where_nothing_listens_is_said_in_bounded_time():
    address = f"127.0.0.1:{silent_port()}"
    cluster = config(items(1), cluster={"executor": "ray", "address": address}).cluster
    with pytest.raises(ConfigError, match=f"nothing listens at '{address}'.*start Ray there"):
        wait_for(cluster, patience_s=0.2)


def test_an_address_that_answers_or_names_no_port_is_left_to_ray():
    with socket.create_server(("127.0.0.1", 0)) as server:
        for address in (f"127.0.0.1:{server.getsockname()[1]}", f"ray://127.0.0.1:{server.getsockname()[1]}", "auto"):
            wait_for(config(items(1), cluster={"executor": "ray", "address": address}).cluster, patience_s=0.0)


@pytest.mark.slow
def test_a_signal_ends_the_wait_for_an_address_and_releases_the_folder(tmp_path):
    process = command(tmp_path, "cluster.executor=ray", f"cluster.address=127.0.0.1:{silent_port()}")
    apart.until(lambda: (tmp_path / "run" / "events.jsonl").exists() or process.poll() is not None)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=20)[1]
    assert process.returncode == 4 and "received SIGTERM" in said, said
    again = command(tmp_path, "cluster=inline")
    assert again.wait(timeout=60) == 0, again.communicate()[1]


@pytest.mark.slow
def test_a_second_interrupt_ends_a_run_in_this_process_at_once(tmp_path):
    (tmp_path / "sleepy.py").write_text(
        "import time\n\ndef wait(conversation):\n    open('asleep', 'w').close()\n    time.sleep(60)\n    return {}\n"
    )
    process = command(tmp_path, "cluster=inline", "scenario.analyzers=[sleepy:wait]")
    apart.until(lambda: (tmp_path / "asleep").exists() or process.poll() is not None)
    process.send_signal(signal.SIGINT)
    time.sleep(1.0)
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=30)[1]
    assert process.returncode == 4 and time.monotonic() - begun < 10, said
    assert "Traceback" not in said, said
