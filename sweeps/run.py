"""What `sweeps.open` returns: a `Run`, or `Runs`, several folders read together with a column `run` in every table."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import pyarrow as pa
import torch

from .aggregates.shards import ShardedRun
from .aggregates.source import Source
from .aggregates.vectors import gather
from .errors import did_you_mean
from .folder import names
from .folder.reader import TABLES
from .folder.results import direction_names, read_directions, read_results
from .folder.store import Where
from .plan.normal import resolved
from .replica.models import Models
from .replica.setting import Setting
from .report.page import overview, section

if TYPE_CHECKING:
    from torch import Tensor

    from interlens.conversation import Conversation
    from interlens.interp.activation_cache import ActivationRecord
    from interlens.message import Message


class Shown(str):
    """A small page of HTML. Jupyter shows it in a frame, so that its style stays inside."""

    def _repr_html_(self) -> str:
        return f'<iframe srcdoc="{html.escape(self)}" style="width:100%;height:34rem;border:0"></iframe>'


class Run(ShardedRun):
    """One run folder: what was planned, said, computed and found. Reads lazily and trusts only commits."""

    def results(self) -> dict[str, dict[str, Any]]:
        """Name -> result of every aggregate that has been finished, as in `aggregates/<name>.json`."""

        return read_results(self.store)

    def directions(self, name: str = "directions") -> dict[str, Tensor]:
        """Tensor name (`residual.16`) -> direction [D] float32 of unit norm, of one aggregate. KeyError: it has none."""

        if not self.store.exists(names.directions(name)):
            raise KeyError(
                f"no directions of {name!r} here; there are: {', '.join(direction_names(self.store)) or 'none'}"
            )
        return {key: torch.from_numpy(value) for key, value in read_directions(self.store, name)[0].items()}

    def plot(self, name: str) -> Shown:
        """The tables and charts of one aggregate, as the report has them; Jupyter shows them. KeyError: no result."""

        results = self.results()
        if name not in results:
            raise KeyError(f"no result {name!r} here; there are: {', '.join(results) or 'none'}")
        return Shown(section(results[name]))

    def _repr_html_(self) -> str:

        return str(overview(self))

    # ---- arrays, live conversations, data sets

    def vectors(self, *, site: str = "residual", layer: int | None = None, participant: str | None = None,
                pool: str = "mean", selection: str | None = None,
                where: Any = None) -> tuple[np.ndarray, pa.Table]:  # fmt: skip
        """Pooled records as one array [N, D] float32, and the table of their N rows.

        The table has the index columns and the cell's item, axes and seeds; a trunk's own records have cell null.
        `selection`: the capture's tokens, as in the column of that name, where several captures have this pool.
        `where`: a pyarrow expression over the index columns. ValueError where widths differ; KeyError as `query`.
        """

        filters: dict[str, Any] = {"site": site, "pool": pool}
        named = (("layer", layer), ("participant", participant), ("selection", selection))
        filters |= {k: v for k, v in named if v is not None}
        table = self.joined(self.records.matching(where, filters))
        return (gather(self, table, Source(pool=pool))[0] if table.num_rows else np.zeros((0, 0), np.float32)), table

    def conversation(self, cell: str) -> Conversation:
        """A live Conversation with a cell's messages, participants and seeds: to go on, branch or steer. Loads models.

        Its view is rendered to the recorded tokens; a `step` is keyed as the next turn of the cell would be.
        """

        planned = self.plan_row(cell)
        unit = self.plan.unit(planned["unit"])
        condition = next(c.condition for c in unit.cells if c.id == cell)
        config = resolved(self.config_of(unit.part), condition)
        setting = Setting(config, Models(config), self.store)
        made = setting.conversation("branch", unit.items[planned["item"]], self.messages(cell))
        made.key = (planned["item"], planned["trunk_seed"], planned["branch_seed"])
        if shared := self.num_trunk_messages(cell):
            made.branch_start = shared
        return made

    def to_ray_dataset(self, name: str = "messages", columns: Sequence[str] | None = None) -> Any:
        """The committed files of a table as a Ray Dataset, on the Ray cluster that this process is connected to."""

        from .driver.executors.ray_tasks import read_parquet  # Ray is loaded where it is used

        if name not in TABLES:
            raise KeyError(f"no table {name!r}{did_you_mean(name, TABLES)}")
        return read_parquet([self.store.arrow(file) for file in self.paths(name)], self.store.arrow_fs, columns)


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


@overload
def open(path: Where) -> Run: ...


@overload
def open(path: Sequence[Where]) -> Runs: ...


def open(path: Where | Sequence[Where]) -> Run | Runs:
    """A run folder, local or an fsspec URL; or several read together. ConfigError: none there, or an unknown schema."""
    if isinstance(path, str) or not isinstance(path, Iterable):
        return Run(path)

    return Runs([Run(one) for one in path])
