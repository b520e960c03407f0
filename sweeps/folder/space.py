"""Free space of a disk, and amounts as people read them."""

from __future__ import annotations

from .store import Where, open_store

RESERVE_BYTES = 500_000_000
"""What a run leaves free on its disk."""


def human(size: float) -> str:
    """Bytes in the unit that reads best."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def free_bytes(at: Where) -> int | None:
    """Free space of the disk on which a folder lies or will lie; None on object stores."""
    return open_store(at).free_bytes()
