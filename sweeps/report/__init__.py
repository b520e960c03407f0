"""The report: one self-contained HTML page about a run, and its closing lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..places import Remote


def write_report(run: Any, path: str | Path | None = None) -> Path | Remote:
    """Write the page of a run (default `RUN/report/index.html`) and return where it is. No external requests."""
    from .page import write

    return write(run, path)
