"""Calls that annotations forbid and that must be refused at run time too, as they are where nothing checks annotations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from jaxtyping import config


@contextmanager
def unchecked() -> Iterator[None]:
    """Within the block, calls into `interlens` are not checked against its annotations (see `addopts`)."""
    before = config.jaxtyping_disable
    config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        config.update("jaxtyping_disable", before)
