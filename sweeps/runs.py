"""Several run folders read together: every table gets a column `run`, the folder it comes from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from interlens.interp.activation_cache import ActivationRecord
    from interlens.message import Message

    from .run import Run


class Runs:
    """A sequence of runs with the reading half of `Run`. A cell that several hold is read from the first."""

    def __init__(self, runs: Sequence[Run]):
        self.runs = tuple(runs)

    def __len__(self) -> int:
        return len(self.runs)

    def __getitem__(self, index: int) -> Run:
        return self.runs[index]

    @property
    def cells(self) -> pa.Table:
        """The cells of all; an axis that a run does not have is null there."""
        return self._tables(lambda run: run.cells)

    def table(self, name: str, columns: Sequence[str] | None = None, filter: Any = None) -> pa.Table:
        """A committed table of all."""
        return self._tables(lambda run: run.table(name, columns, filter))

    def outcomes(self) -> pa.Table:
        """Outcomes of all, with items, axes and seeds."""
        return self._tables(lambda run: run.outcomes())

    def files(self, table: str) -> list[str]:
        """The committed files of all."""
        return [file for run in self.runs for file in run.files(table)]

    def messages(self, cell: str) -> list[Message]:
        """The conversation of a cell, from the first run that has finished it. KeyError where none has."""
        for run in self.runs:
            try:
                return run.messages(cell)
            except KeyError:
                continue
        raise KeyError(f"none of {len(self.runs)} runs has finished a cell {cell!r}")

    def query(self, **filters: Any) -> list[ActivationRecord]:
        """Matching records of all, run after run. KeyError where none has any, as `Run.query`."""
        return [record for found in self._each(lambda run: run.query(**filters)) for record in found]

    def vectors(self, **options: Any) -> tuple[np.ndarray, pa.Table]:
        """Pooled records of all as one array, and the table of its rows. ValueError where widths differ; KeyError where
        none has any."""
        found = list(self._each(lambda run: (run, *run.vectors(**options))))
        full = [(run, x, table) for run, x, table in found if len(x)] or found[:1]
        if len({x.shape[1] for _, x, _ in full}) > 1:
            raise ValueError(f"these runs have vectors of widths {sorted({x.shape[1] for _, x, _ in full})}")
        tables = [_named(table, run) for run, _, table in full]
        return np.concatenate([x for _, x, _ in full]), pa.concat_tables(tables, promote_options="permissive")

    def _each(self, read: Callable[[Run], Any]) -> list[Any]:
        """What `read` finds in those runs that have what it names; the last KeyError where none has."""
        found, missing = [], None
        for run in self.runs:
            try:
                found.append(read(run))
            except KeyError as error:
                missing = error
        if missing is not None and not found:
            raise missing
        return found

    def _tables(self, read: Callable[[Run], pa.Table]) -> pa.Table:
        return pa.concat_tables([_named(read(run), run) for run in self.runs], promote_options="permissive")


def _named(table: pa.Table, run: Run) -> pa.Table:
    return table.append_column("run", pa.array([str(run.root)] * table.num_rows, pa.string()))
