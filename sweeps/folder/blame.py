"""Whose fault an unexpected error is: where the folder it was read from is damaged, the folder's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from interlens.errors import InterlensError

from ..errors import Damaged
from .reader import RunFolder
from .verify import verify

UNEXPECTED = (
    KeyError,
    TypeError,
    ValueError,
    AttributeError,
    IndexError,
    AssertionError,
    RecursionError,
    OverflowError,
)
"""What reading a file raises that holds something else than is written there."""


@contextlib.contextmanager
def blaming(*runs: RunFolder) -> Iterator[None]:
    """An unexpected error inside, where a folder is damaged, becomes Damaged and names what `sweeps verify --deep` finds
    first; where all is sound it is a fault of ours and stays what it is."""
    try:
        yield
    except InterlensError:
        raise
    except UNEXPECTED as error:
        for run in runs:
            if problems := verify(run.store, deep=True).problems:
                said = f"{problems[0]}; all of it: sweeps verify {run.store} --deep"
                raise Damaged(said) from error
        raise
