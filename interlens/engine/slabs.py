"""The KV of all rows: per layer one slab `[rows, heads, columns, head_dim]` in which column = absolute position.

Nothing is padded, merged, trimmed or concatenated. A forward writes each row's new columns in place and reads a view
of the rows and columns it needs; retiring, parking, reusing and forking copy columns. Slabs grow by need. Columns that
a row has not written hold zeros or an earlier row's finite values and are always masked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache

from .attention import COLUMNS


@dataclass(frozen=True, kw_only=True)
class Columns:
    """A copy of one row's first columns, per layer (keys `[heads, n, dim]`, values `[heads, n, dim]`)."""

    layers: tuple[tuple[Tensor, Tensor], ...]
    num_columns: int


@dataclass(frozen=True, kw_only=True)
class Window:
    """Which part of the slabs one forward touches: slab rows `[first, first + num_rows)` and columns `[0, width)`.

    `row, query, column` name the tokens whose KV is written: batch row, query index and absolute position of each.
    """

    first: int
    num_rows: int
    width: int
    row: Tensor
    query: Tensor
    column: Tensor


class Slabs(Cache):
    """All layers' slabs, used by a transformers model as its cache. `window` is set before each forward."""

    def __init__(self):
        super().__init__(layers=[])
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.num_rows = 0
        self.num_columns = 0
        self.window: Window | None = None

    def resize(self, num_rows: int, num_columns: int) -> None:
        """Grow or shrink to this size; the rows and columns that both have stay."""
        if (num_rows, num_columns) == (self.num_rows, self.num_columns):
            return
        for slabs in (self.keys, self.values):
            for layer in list(slabs):
                slabs[layer] = _resized(slabs[layer], num_rows, num_columns)
        self.num_rows, self.num_columns = num_rows, num_columns

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Write the real tokens' keys and values, and return the window's view."""
        window = self.window
        if window is None:
            raise RuntimeError("the engine's cache was used outside an engine forward")
        keys = self._slab(self.keys, key_states, layer_idx)
        values = self._slab(self.values, value_states, layer_idx)
        row, query, column = (index.to(keys.device) for index in (window.row, window.query, window.column))
        keys[row + window.first, :, column] = key_states[row, :, query]
        values[row + window.first, :, column] = value_states[row, :, query]
        last = window.first + window.num_rows
        return keys[window.first : last, :, : window.width], values[window.first : last, :, : window.width]

    def _slab(self, slabs: dict[int, Tensor], states: Tensor, layer: int) -> Tensor:
        if layer not in slabs:
            shape = (self.num_rows, states.shape[1], _whole(self.num_columns), states.shape[3])
            slabs[layer] = torch.zeros(shape, dtype=states.dtype, device=states.device)
        return slabs[layer]

    def move(self, source: int, target: int, num_columns: int) -> None:
        """Copy a row's first columns over another row's (retiring moves the last row into the hole)."""
        for slab in (*self.keys.values(), *self.values.values()):
            slab[target, :, :num_columns] = slab[source, :, :num_columns]

    def take(self, row: int, num_columns: int) -> Columns:
        """A compact copy of a row's first columns."""
        layers = tuple(
            (self.keys[i][row, :, :num_columns].clone(), self.values[i][row, :, :num_columns].clone())
            for i in sorted(self.keys)
        )
        return Columns(layers=layers, num_columns=num_columns)

    def put(self, row: int, columns: Columns, num_columns: int) -> None:
        """Fill a row's first columns from a copy."""
        for i, (keys, values) in zip(sorted(self.keys), columns.layers, strict=True):
            self.keys[i][row, :, :num_columns] = keys[:, :num_columns]
            self.values[i][row, :, :num_columns] = values[:, :num_columns]

    def clear(self, row: int) -> None:
        """Zero a row."""
        for slab in (*self.keys.values(), *self.values.values()):
            slab[row] = 0

    def bytes_per_column(self) -> int:
        """Bytes one column of one row takes over all layers; 0 before the first forward."""
        slabs = (*self.keys.values(), *self.values.values())
        return sum(slab.shape[1] * slab.shape[3] * slab.element_size() for slab in slabs)

    # What transformers asks of a cache. Positions and masks are always passed, so no model derives them from here.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of the window in use; transformers asks it of a cache."""
        return self.window.width if self.window else 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(length, offset) of the keys that a mask covers; transformers asks it of a cache."""
        return (self.window.width if self.window else query_length), 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """No limit: slabs grow; transformers asks it of a cache."""
        return -1

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def is_compileable(self) -> bool:
        """No: widths change; transformers asks it of a cache."""
        return False


def _whole(num_columns: int) -> int:
    """Columns that are allocated: a forward may read up to the next multiple of `COLUMNS`, all of it masked."""
    return -(-num_columns // COLUMNS) * COLUMNS


def _resized(slab: Tensor, num_rows: int, num_columns: int) -> Tensor:
    resized = slab.new_zeros((num_rows, slab.shape[1], _whole(num_columns), slab.shape[3]))
    rows, columns = min(num_rows, slab.shape[0]), min(num_columns, slab.shape[2])
    resized[:rows, :, :columns] = slab[:rows, :, :columns]
    return resized
