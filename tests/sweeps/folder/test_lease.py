"""Laws of the lease: one holder; a dead one is replaced at once, a silent one after watching, a live one never."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time

import pytest

from sweeps.errors import Held
from sweeps.folder.lease import Lease, latest

HOLD = """
import sys, time
from sweeps.folder.lease import Lease
Lease(sys.argv[1], interval_s=0.2).acquire()
print("held", flush=True)
time.sleep(60)
"""


def holder(folder):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def test_a_live_driver_refuses_a_second_and_a_dead_one_is_replaced_at_once(tmp_path):
    first = holder(tmp_path)
    try:
        with pytest.raises(Held, match=f"pid {first.pid}"):
            Lease(tmp_path, interval_s=0.2, takeover_s=30).acquire()
    finally:
        first.kill()
        first.wait()
    start = time.monotonic()
    lease = Lease(tmp_path, takeover_s=30)
    lease.acquire()
    assert time.monotonic() - start < 5
    lease.release()
    assert latest(tmp_path)["released"]


def test_a_silent_holder_elsewhere_is_watched_and_then_replaced(tmp_path):
    lost = Lease(tmp_path, interval_s=60)
    lost._create(1)
    path = tmp_path / "_lease" / "1.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "where": "another host"}))
    lease = Lease(tmp_path, interval_s=0.5, takeover_s=0.6)
    start = time.monotonic()
    lease.acquire()
    assert time.monotonic() - start >= 0.6 and lease.number == 2
    with pytest.raises(Held):
        lost._create(2)
    lease.release()


def test_a_holder_that_finds_another_number_says_that_it_lost(tmp_path):
    lease = Lease(tmp_path, interval_s=0.1)
    lease.acquire()
    lease.confirm()
    other = Lease(tmp_path)
    while True:  # another driver takes the next number
        try:
            other._create(lease._latest() + 1)
            break
        except Held:
            pass
    with pytest.raises(Held, match="another driver"):
        lease.confirm()
    deadline = time.monotonic() + 5
    while not lease.lost and time.monotonic() < deadline:
        time.sleep(0.02)
    assert lease.lost and "another driver" in lease.lost


def test_of_many_drivers_at_once_one_wins(tmp_path):
    won, refused = [], []

    def try_it():
        lease = Lease(tmp_path, interval_s=0.1, takeover_s=2)
        try:
            lease.acquire()
            won.append(lease)
        except Held:
            refused.append(1)

    threads = [threading.Thread(target=try_it) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1 and len(refused) == 7
    won[0].release()


def test_old_numbers_are_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr("sweeps.folder.lease.KEPT", 3)
    lease = Lease(tmp_path)
    for number in range(1, 9):
        lease._create(number)
    lease._prune()
    assert sorted(lease._numbers()) == [6, 7, 8]
