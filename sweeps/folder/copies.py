"""A run folder's own copies of what it reads: named by their content's hash."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from .. import errors
from . import files, names
from .store import Where, open_store

if TYPE_CHECKING:
    from torch import Tensor


def content_hash(tensor: Tensor) -> str:
    """20 hex digits over a tensor's shape and float32 values."""
    values = tensor.detach().float().contiguous().cpu().numpy()
    return hashlib.blake2b(repr(values.shape).encode() + values.tobytes(), digest_size=10).hexdigest()


def copied_direction(at: Where, digest: str) -> Tensor:
    """A run folder's copy of a direction. Damaged: its content is not what its name says."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    store, name = open_store(at), names.direction(digest)
    try:
        tensor = load(store.read(name))["direction"]
    except (SafetensorError, KeyError) as error:
        raise files.damaged(store, name, error) from None
    if content_hash(tensor) != digest:
        raise errors.Damaged(f"{name} of {str(store)!r} was changed; restore it from a copy of the run")
    return tensor
