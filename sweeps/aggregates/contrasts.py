"""What every aggregate over a contrast shares: its options, its labelled places, its held-out evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from interlens.probes import cosine_map, evaluate, fit

from .base import Spread
from .columns import check_known, check_met, read_labels
from .expressions import parse, parse_contrast
from .shards import ShardedRun
from .source import Source
from .vectors import Labelled, Place, Question, labelled, labelled_places, leaks, places, tensor_names

CONTROLS = ("shuffled", "random", "orthogonal")

FINER_THAN_TRUNK = ("cell", "branch_seed", "message_idx")


class ContrastFit:
    """A contrast over stored vectors. `split` is what a held-out split never cuts; `where` keeps some rows only.

    `participant, pool, tokens, phase, max_norm, weight`: which stored rows, as `Source` has them.
    `labels`: a CSV or Parquet file joined by `cell` (and `message_idx`), whose columns are `label.<column>`.
    `max_rows`: above it a keyed sample of rows is read and evaluated, and the result says so.
    """

    kind = ""
    method = ""
    spread: tuple[dict[str, Any], Spread] | None = None
    """(options, cluster) where places are to be worked on side by side."""

    def __init__(
        self,
        name: str,
        *,
        contrast: str,
        split: str = "item",
        where: str | None = None,
        labels: str | None = None,
        controls: Sequence[str] = CONTROLS[:2],
        participant: str | None = None,
        pool: str | None = "mean",
        tokens: str | None = None,
        phase: str | None = None,
        max_norm: float | None = None,
        weight: str | None = None,
        folds: int = 5,
        draws: int = 1000,
        permutations: int = 20,
        max_rows: int = 50_000,
    ):
        unknown = sorted(set(controls) - set(CONTROLS))
        if unknown:
            raise ValueError(f"no control {unknown[0]!r}; there are: {', '.join(CONTROLS)}")
        self.name = name
        self.contrast = parse_contrast(contrast)
        self.where = None if where is None else parse(where)
        self.labels = labels
        self.split, self.controls = split, tuple(controls)
        self.source = Source(
            pool=pool, participant=participant, tokens=tokens, phase=phase, max_norm=max_norm, weight=weight
        )
        self.folds, self.draws, self.permutations, self.max_rows = folds, draws, permutations, max_rows

    def check(self, config: Any) -> None:
        """ValueError if an expression or the split names a column that no cell of `config` will have."""
        check_known(self.contrast.names, config, self.contrast.source, self.labels is not None)
        check_known([self.split], config, f"split: {self.split}", self.labels is not None)
        for side in (self.contrast.positive, self.contrast.negative):
            check_met(side, config.grid)
        if self.where is not None:
            check_known(self.where.names, config, self.where.source, self.labels is not None)
            check_met(self.where, config.grid)
        if self.labels is not None:
            read_labels(self.labels)
        if self.split in FINER_THAN_TRUNK:
            raise ValueError(f"split: {self.split} is finer than a trunk, so siblings would leak; use item or trunk")

    def described(self) -> dict[str, Any]:
        """What was asked, for the result."""
        return {
            "kind": self.kind,
            "contrast": self.contrast.source,
            "positive": self.contrast.positive.source,
            "negative": self.contrast.negative.source,
            "where": self.where.source if self.where else None,
            "labels": self.labels,
            "split": self.split,
            **self.source.described(),
        }

    def places(self, run: ShardedRun) -> Iterator[Labelled]:
        """The labelled vectors of every place this aggregate reads, one after the other."""
        return labelled_places(run, self.question())

    def each_place(self, run: ShardedRun, what: str) -> Iterator[tuple[Place, Any]]:
        """What the method `what` (run, place) makes of every place, in order: here, or with `spread` in other processes."""
        found = places(run, self.source)
        if self.spread is None:
            yield from ((place, getattr(self, what)(run, place)) for place in found)
            return

        options, spread = self.spread
        calls = [(run.store.address, self.name, options, what, place.key) for place in found]
        made = dict(spread("sweeps.aggregates.recompute:at_place", calls))
        yield from ((place, made[number]) for number, place in enumerate(found))

    def evaluated(self, run: ShardedRun, place: Place) -> dict[str, Any]:
        """`evaluation` of one place."""
        return self.evaluation(labelled(run, place, self.question()))

    def question(self, *also: str) -> Question:
        """What this aggregate asks of the stored vectors."""
        return Question(
            contrast=self.contrast, source=self.source, split=self.split, where=self.where, labels=self.labels,
            also=also, max_rows=self.max_rows,
        )  # fmt: skip

    def evaluation(self, data: Labelled | None, **options: Any) -> dict[str, Any]:
        """`evaluation` of one place on held-out groups, or None and `why` there is none."""
        if data is None or not len(data.y):
            return {"evaluation": None, "why": "no stored vectors of either side"}
        if data.weights is not None:
            options["weights"] = data.weights
        try:
            found = evaluate(
                data.x,
                data.y,
                data.groups,
                method=self.method,
                folds=self.folds,
                draws=self.draws,
                permutations=self.permutations if "shuffled" in self.controls else 0,
                random_directions=20 if "random" in self.controls else 0,
                orthogonal_directions=20 if "orthogonal" in self.controls else 0,
                **options,
            )
        except ValueError as error:
            return {"evaluation": None, "why": str(error)}
        counted = {
            "warnings": leaks(data, self.split),
            "rows": len(data.y),
            "rows_stored": data.num_stored,
            "excluded": data.num_excluded,
            "removed": data.removed,
            "removed_at_capture": data.removed_at_capture,
        }
        return {"evaluation": {**found.summary(), **counted}}


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """The result with the cosines between its directions."""
    if len(result["tensors"]) > 1:
        names, cosines = cosine_map(result["tensors"])
        result["cosines"] = {"names": names, "values": cosines.tolist()}
    return result


class MessageFit(ContrastFit):
    """A ContrastFit whose rows are messages: unpooled records by their means."""

    def __init__(self, name: str, *, weight: str | None = "message", **options: Any):
        if weight == "token":
            raise ValueError(f"{self.kind} fits messages; weight: token is for difference_of_means and moments")
        super().__init__(name, weight="message", **options)


class ProbeFit(MessageFit):
    """A Fit of one probe per place. Result: `directions` as `difference_of_means` has them, and their tensors."""

    def fit(self, run: ShardedRun, finished: dict[str, Any] | None = None) -> dict[str, Any]:
        """Fit on all rows (or the keyed sample of `max_rows`), evaluate on held-out groups."""
        made = list(self.each_place(run, "fitted"))
        names = tensor_names(place for place, _ in made)
        entries, tensors = [], {}
        for place, (entry, direction) in made:
            if direction is not None:
                entry = {**entry, "tensor": names[place]}
                tensors[names[place]] = direction
            entries.append(entry)
        return summary({**self.described(), "directions": entries, "tensors": tensors})

    def fitted(self, run: ShardedRun, place: Place) -> tuple[dict[str, Any], Any]:
        """One place's entry, and its direction [D] or None."""
        data = labelled(run, place, self.question())
        entry = {
            "key": place.key,
            **place.columns(),
            "num_pos": int(data.y.sum()),
            "num_neg": int((~data.y).sum()),
            "num_neither": data.num_neither,
            "non_finite": data.non_finite,
            "removed": data.removed,
            "norm": None,
        }
        try:
            probe = fit(self.method, data.x, data.y, data.groups)
        except ValueError as error:
            return {**entry, "evaluation": None, "why": str(error)}, None
        return {**entry, "norm": probe.norm, "threshold": probe.threshold, **self.evaluation(data)}, probe.direction
