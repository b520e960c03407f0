"""Hundreds of small tests: what was imported is left out of the search for hooks that follows each of them."""

import gc

import pytest


@pytest.fixture(scope="session", autouse=True)
def imports_are_not_searched():
    from tests.support.tiny import FAMILIES, tiny

    for family in FAMILIES:
        tiny(family)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
