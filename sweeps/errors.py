"""The errors of sweeps, and the nearest known name for a typo."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from interlens.errors import InterlensError


class ConfigError(InterlensError, ValueError):
    """The configuration asks for something impossible; one line says what, what is possible and what to do."""


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """ "; did you mean 'x'? known: ..." for an error message: the nearest known name, and all of them."""
    known = sorted(map(str, known))
    close = difflib.get_close_matches(str(given), known, 1, 0.5)
    return (f"; did you mean {close[0]!r}?" if close else ";") + f" known: {', '.join(known) or 'none'}"


class Damaged(InterlensError, ValueError):
    """A file of a run folder that was written whole is no longer so."""


class RunRefused(InterlensError):
    """The folder holds another run, or cannot be continued as asked; nothing was changed. Exit code 5."""


class Held(RuntimeError):
    """Another driver holds the folder."""
