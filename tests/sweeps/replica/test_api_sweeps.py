"""API participants in a sweep: one limit in flight per replica, retries of single turns, and a budget in dollars."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from sweeps import run as sweeps_run
from sweeps.compose import from_plain
from sweeps.driver import entry
from sweeps.errors import ConfigError
from sweeps.folder import status
from sweeps.folder.verify import verify
from tests.support.server import ChatServer, serve


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "not-a-key")


def settings(url, items=4, **changes):
    """Two turns a cell, by two participants behind one API; each request costs ten cents."""
    who = {"kind": "api", "model": "m", "base_url": url, "prices": {"prompt": 10_000.0, "completion": 0.0}, **changes}
    return from_plain({
        "scenario": {
            "items": [{"id": f"i{n}"} for n in range(items)], "opening": "Hello.", "branch": {"turns": 2, "seeds": 2},
            "participants": {"alice": who, "bob": {**who, "system_prompt": "You are {id}."}},
        },
        "plan": {"unit_cells": 4}, "cluster": {"executor": "inline", "in_flight": 2},
        "run": {"progress": "none", "interval_s": 0.1},
    })  # fmt: skip


def test_all_conversations_share_one_limit_and_only_unanswered_turns_are_asked_again(tmp_path):
    chat = ChatServer([("status", 503, {"Retry-After": "0"}), "cut"], pause_s=0.02)
    with serve(chat) as url:
        assert entry.run(settings(url, max_in_flight=3), tmp_path / "run") == 0
    assert chat.most_in_flight == 3 and len(chat.requests) == 16 + 2
    run = sweeps_run.open(tmp_path / "run")
    assert sum(commit.counters["cost"] for commit in run.commits()) == pytest.approx(1.6)
    prompts = {body["messages"][0]["content"] for body in chat.requests if body["messages"][0]["role"] == "system"}
    assert {f"You are i{n}." for n in range(4)} <= prompts, "what they share is no prompt"
    assert verify(run.root, deep=True).ok


def test_judges_are_within_the_limit_and_the_budget(tmp_path):
    chat = ChatServer(pause_s=0.02)
    with serve(chat) as url:
        plain = settings(url, items=2, max_in_flight=2).to_dict()
        judge = {"kind": "api", "model": "m", "base_url": url, "prompt": "Rate: {transcript}", "max_in_flight": 2,
                 "prices": {"prompt": 10_000.0, "completion": 0.0}}  # fmt: skip
        del plain["inputs"]
        plain["grid"], plain["aggregate"] = {}, {}
        config = from_plain({**plain, "scenario": {**plain["scenario"], "judges": {"warmth": judge}}})
        assert entry.run(config, tmp_path / "run") == 0
    assert chat.most_in_flight == 2 and len(chat.requests) == 8 + 4
    spent = sum(commit.counters["cost"] for commit in sweeps_run.open(tmp_path / "run").commits())
    assert spent == pytest.approx(1.2)
    with pytest.raises(ConfigError, match="without: warmth"):
        bare = {**judge, "prices": None}
        from_plain({**plain, "scenario": {**plain["scenario"], "judges": {"warmth": bare}}, "run": {"max_cost": 1.0}})


def test_a_spent_budget_stops_like_a_signal_and_a_larger_one_goes_on(tmp_path, capsys):
    chat = ChatServer(pause_s=0.1)
    folder = tmp_path / "run"
    with serve(chat) as url:
        plenty = settings(url, items=20, max_in_flight=2)
        assert plenty == replace(plenty, run=replace(plenty.run, max_cost=None))
        little = replace(plenty, run=replace(plenty.run, max_cost=1.0))
        assert entry.run(little, folder) == 4
        while chat.in_flight:
            time.sleep(0.01)
        asked = len(chat.requests)
        assert 10 <= asked < 60 and "of run.max_cost=$1 are spent" in capsys.readouterr().err
        counts = sweeps_run.open(folder).counts
        assert counts["done"] > 0 and counts["failed"] == 0 and counts["pending"] > 0
        assert status.events(folder)[-1]["code"] == 4
        spent = sum(commit.counters["cost"] for commit in sweeps_run.open(folder).commits())
        assert entry.run(replace(plenty, run=replace(plenty.run, max_cost=spent)), folder) == 4
        assert len(chat.requests) == asked, "the folder knows what was spent: nothing is asked before it stops"
        chat.pause_s = 0.0
        assert entry.run(replace(plenty, run=replace(plenty.run, max_cost=100.0)), folder) == 0
    assert sweeps_run.open(folder).counts == {"done": 40, "failed": 0, "pending": 0}


def test_a_budget_needs_prices():
    who = {"kind": "api", "model": "m"}
    plain = {
        "scenario": {"items": [{"id": "i"}], "participants": {"alice": who, "bob": who}, "branch": {"turns": 1}},
        "run": {"max_cost": 1.0},
    }
    with pytest.raises(ConfigError, match=r"every API participant and judge needs prices.*without: alice, bob"):
        from_plain(plain)
