"""Processes of their own, to be killed: forked from one that has imported everything, so that each starts at once."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["sweeps.driver.entry", "sweeps.replica.replica", "tests.support.fakes", "tests.support.small"]
)


def start(function: Callable[..., Any], *arguments: Any, **env: str) -> BaseProcess:
    """`function(*arguments)` in a process with these variables; what it returns is its exit code."""
    process = _context.Process(target=_call, args=(function, arguments, {**os.environ, **env}))
    process.start()
    return process


def wait(process: BaseProcess, timeout_s: float = 400) -> int:
    """The exit code of a process, -N where signal N ended it."""
    process.join(timeout_s)
    if process.exitcode is None:
        process.kill()
        raise AssertionError(f"still running after {timeout_s} s")
    return process.exitcode


def until(holds: Callable[[], Any], timeout_s: float = 120) -> Any:
    """Wait for a condition, and return what it gave."""
    deadline = time.monotonic() + timeout_s
    while not (found := holds()):
        assert time.monotonic() < deadline, f"waited {timeout_s} s in vain"
        time.sleep(0.01)
    return found


def _call(function: Callable[..., Any], arguments: tuple, env: dict[str, str]) -> None:
    from sweeps import failpoints

    os.environ.clear()
    os.environ.update(env)
    failpoints._ARMED = failpoints._armed()
    sys.exit(function(*arguments))
