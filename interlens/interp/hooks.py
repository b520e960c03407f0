"""Hooks that live only inside a with-block.

Invariants: one torch hook per (layer, site); every hook is removed when the block ends, however it ends; after a clean
end every tap has fired, or `HookDidNotFire` names those that did not (a compiled model, a layer that was skipped). One
block at a time per model, whatever thread it is in: hooks would fire in each other's forwards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from ..errors import HookDidNotFire, UnknownSite
from .attach import Attachments, Tap, lock_of
from .locate import locator
from .sites import Place


@contextmanager
def attached(model: nn.Module, taps: Mapping[tuple[int, str], Tap]) -> Iterator[None]:
    """Within the block, `taps[layer, site]` gets that site's value `[B, T, W]` at every forward and may replace it.

    A tap returns None (nothing changes, bit for bit) or a tensor of the same shape, which the model goes on with. What
    it is given must be copied to be kept. Layers and sites are canonical. UnknownSite before anything is attached.
    """
    places = _places(model, taps)
    fired: set[tuple[int, str]] = set()
    with lock_of(model), Attachments() as attachments:
        for key, place in places.items():
            attachments.add(place, taps[key], functools.partial(fired.add, key))
        yield
    if missing := tuple(key for key in taps if key not in fired):
        error = HookDidNotFire(
            f"never reached in this block: {', '.join(f'{site} at layer {layer}' for layer, site in missing)}. "
            "Was there a forward of this very model? Hooks added after torch.compile never fire: attach to the "
            "uncompiled model"
        )
        error.missing = missing
        raise error


@contextmanager
def attached_within(model: nn.Module, layer: nn.Module, shape: torch.Size, taps: Mapping[tuple[int, str], Tap]):
    """Like `attached`, for taps inside one layer, from inside its forward over `shape` = (B, T); may not fire."""
    with Attachments() as attachments:
        attachments.shapes[layer] = shape
        for key, place in _places(model, taps).items() if taps else ():
            attachments.add(place, taps[key], lambda: None)
        yield


def attach(model: nn.Module, taps: Mapping[tuple[int, str], Tap]) -> Callable[[], None]:
    """Like `attached` without a block: hooks stay until the returned function is called. For `register` only."""
    attachments = Attachments()
    try:
        for key, place in _places(model, taps).items():
            attachments.add(place, taps[key], lambda: None)
    except BaseException:
        attachments.remove()
        raise
    return attachments.remove


def _places(model: nn.Module, keys: Iterable[tuple[int, str]]) -> dict[tuple[int, str], Place]:
    at, places = locator(model), {}
    for layer, site in keys:
        place = at.place(site, layer)
        if place is None:
            have = at.layers_with(site)
            where = f"layers {', '.join(map(str, have))}" if have else f"sites {', '.join(at.sites())}"
            raise UnknownSite(f"no site {site!r} at layer {layer} of {type(at.base).__name__}; it has {where}")
        places[layer, site] = place
    return places
