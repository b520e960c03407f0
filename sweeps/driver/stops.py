"""Why and how a run ends early: `Stop`, signals, and the command that continues it."""

from __future__ import annotations

import contextlib
import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Stop(Exception):
    """The run ends before it is complete, with this exit code."""

    def __init__(self, code: int, reason: str):
        super().__init__(code, reason)
        self.code, self.reason = code, reason


@contextlib.contextmanager
def signals(on_signal: Any) -> Iterator[None]:
    """Ctrl-C and SIGTERM ask the run to stop; a second Ctrl-C ends it at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seen: list[int] = []

    def handle(number: int, frame: Any) -> None:
        if seen and number == signal.SIGINT:
            raise KeyboardInterrupt
        seen.append(number)
        on_signal(signal.Signals(number).name)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def command() -> str:
    """The command that started this process, to show to its user."""
    program = Path(sys.argv[0])
    name = f"python -m {program.parent.name}" if program.name == "__main__.py" else program.name
    return f"{name} {shlex.join(sys.argv[1:])}".strip()
