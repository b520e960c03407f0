"""Sections of the page for the results that are tables: moments, logprobs, probe evaluation, similarity, routing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .markup import Markup, interval, join, number, table, tag

Result = dict[str, Any]


def moments(result: Result) -> Markup:
    """Count, norms and what was left out, per place and value of `by`."""
    head = [
        "participant",
        "site",
        "layer",
        *_by(result["moments"]),
        "rows",
        "non-finite",
        "above max_norm",
        "norm of mean",
        "rms norm",
        "total variance",
    ]
    rows = [
        [
            e["participant"],
            e["site"],
            e["layer"],
            *_values(e),
            number(e["count"]),
            number(e["non_finite"]),
            number(e["removed"]),
            number(e["norm_of_mean"]),
            number(e["rms_norm"]),
            number(e["total_variance"]),
        ]
        for e in result["moments"]
    ]
    return table(head, rows, numeric=2)


def logprob_summary(result: Result) -> Markup:
    """Surprisal and entropy per speaker and value of `by`."""
    entries = result["summary"]
    head = [
        "participant",
        *_by(entries),
        "tokens",
        "surprisal, nats",
        "perplexity",
        "entropy, nats",
        "messages without",
    ]
    rows = [
        [
            e["participant"],
            *_values(e),
            number(e["tokens"]),
            number(e["surprisal"]),
            number(e["perplexity"]),
            number(e["entropy"]),
            number(e["messages_without"]),
        ]
        for e in entries
    ]
    return table(head, rows, numeric=1)


def probe_eval(result: Result) -> Markup:
    """Methods side by side, layers as chosen inside the folds; then transfer and warnings."""
    head = [
        "participant",
        "site",
        "tokens",
        "method",
        "held-out AUROC",
        "accuracy",
        "recall at 1 % FPR",
        "shuffled",
        "random",
        "layers chosen",
    ]
    rows = []
    for e in result["probes"]:
        found = e["evaluation"] or {}
        shuffled, drawn = ((found.get(name) or {}).get("mean") for name in ("shuffled", "random"))
        rows.append(
            [
                e["participant"],
                e["site"],
                e.get("selection", ""),
                e["method"].replace("_", " "),
                interval(found["auroc"]) if found else e.get("why"),
                number(found.get("accuracy")),
                number(found.get("recall_at_1_fpr")),
                number(shuffled),
                number(drawn),
                ", ".join(map(str, found.get("layers", ()))),
            ]
        )
    parts = [
        tag("p", "The layer is chosen inside each fold, on its training groups only."),
        table(head, rows, numeric=4),
    ]
    if result["transfer"]:
        parts.append(_transfer(result))
    parts += [tag("p", f"Warning: {warning}.", class_="warning") for warning in result["warnings"]]
    return join(parts)


def _transfer(result: Result) -> Markup:
    """Probes fitted on one condition and tested on another, folded away."""
    crossed = [
        [
            e["participant"],
            e["layer"],
            e["method"].replace("_", " "),
            number(e["fitted_on"]),
            number(e["tested_on"]),
            interval(e["auroc"]),
        ]
        for e in result["transfer"]
    ]
    names = ["participant", "layer", "method", "fitted on", "tested on", "held-out AUROC"]
    return tag("details", tag("summary", "transfer"), table(names, crossed, numeric=3))


def routing_stats(result: Result) -> Markup:
    """Load per expert as bars, and how much two conditions differ."""
    entries = result["routing"]
    head = ["participant", "phase", *_by(entries), "layer", "tokens", "top k", "load per expert", "largest share"]
    rows = []
    for e in entries:
        largest = f"{number(max(e['load']), 2)} (expert {e['load'].index(max(e['load']))})"
        rows.append(
            [
                e["participant"],
                e["phase"],
                *_values(e),
                e["layer"],
                number(e["tokens"]),
                e["top_k"],
                _bars(e["load"]),
                largest,
            ]
        )
    parts = [table(head, rows, numeric=2)]
    if result["comparisons"]:
        names = ["participant", "phase", "layer", "between", "and", "JS divergence, nats", "overlap of the top experts"]
        compared = [
            [
                c["participant"],
                c["phase"],
                c["layer"],
                _condition(c["a"]),
                _condition(c["b"]),
                number(c["js_divergence"]),
                f"{round(c['topk_overlap'] * c['k'])} of {c['k']}",
            ]
            for c in result["comparisons"]
        ]
        parts.append(table(names, compared, numeric=5))
    return join(parts)


def _bars(load: Sequence[float]) -> Markup:
    """Shares as a row of small bars; the dashed line is an even load."""
    width, height, top = 8, 28, max(*load, 2 / len(load))
    bars = [
        tag(
            "rect",
            tag("title", f"expert {i}: {number(share)}"),
            x=i * width,
            y=f"{height * (1 - share / top):.1f}",
            width=width - 2,
            height=f"{height * share / top:.1f}",
            class_="load",
        )
        for i, share in enumerate(load)
    ]
    even = f"{height * (1 - 1 / len(load) / top):.1f}"
    line = tag("line", x1=0, x2=len(load) * width, y1=even, y2=even, class_="reference")
    return tag("svg", *bars, line, viewBox=f"0 0 {len(load) * width} {height}", class_="bars", role="img")


def _condition(by: Mapping[str, Any]) -> str:
    return ", ".join(f"{name.rsplit('.', 1)[-1]} = {number(value)}" for name, value in by.items()) or "all"


def similarity(result: Result) -> Markup:
    """Cosines between directions of one width."""
    parts = []
    for found in result["maps"]:
        chance = number(found["random_mean_abs"])
        chance = f"two random directions have an absolute cosine of {chance} on average"
        parts.append(tag("p", f"Width {found['width']}; {chance}."))
        rows = [[name, *[_shaded(v) for v in row]] for name, row in zip(found["names"], found["values"], strict=True)]
        parts.append(table(["", *found["names"]], rows))
    return join(parts) if parts else tag("p", "No directions to compare.", class_="quiet")


def _shaded(value: float, most: float = 1.0, text: str | None = None) -> Markup:
    """A value on a colour that fades to nothing at 0; `most` is on the deepest."""
    side, step = "up" if value > 0 else "down", min(round(abs(value) / (most or 1.0) * 5), 5)
    return tag("span", number(value, 2) if text is None else text, class_=f"cos {side} c{step}")


def _by(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for entry in entries for name in entry["by"]))


def _values(entry: Mapping[str, Any]) -> list[str]:
    return [number(value) for value in entry["by"].values()]


def outcome_table(result: Result) -> Markup:
    """Per measure and value of `by`: means, rows against columns, on a colour that deepens from 0 to the largest."""
    parts: list[Any] = []
    if result.get("where"):
        parts.append(tag("p", "Cells where ", tag("code", result["where"]), "."))
    if left_out := result.get("non_finite"):
        parts.append(tag("p", f"{number(left_out)} outcomes that are NaN or infinite are left out.", class_="warning"))
    for found in result["tables"]:
        parts.append(tag("h3", table_title(found)))
        counts = sorted({cell["count"] for cell in found["cells"]})
        shown = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0] if counts else 0)
        same = {(mean["value"], mean["low"], mean["high"]) for mean in (cell["mean"] for cell in found["cells"])}
        if len(same) == 1:
            everywhere = f"{interval(found['cells'][0]['mean'], 2)} everywhere, over {shown} cells each."
            parts.append(tag("p", everywhere, class_="quiet"))
            continue
        at = {(cell["row"], cell["column"]): cell for cell in found["cells"]}
        most = max(abs(cell["mean"]["value"]) for cell in found["cells"])
        rows = [
            [number(row), *[_mean_cell(at.get((row, column)), most) for column in result["column_levels"]]]
            for row in result["row_levels"]
        ]
        parts.append(table([result["rows"], *map(str, result["column_levels"])], rows))
        parts.append(tag("p", f"Means over {shown} cells; 95 % intervals by bootstrap over items.", class_="quiet"))
    return join(parts)


def table_title(found: Mapping[str, Any]) -> str:
    """The measure, and what this table is kept apart by."""
    return ", ".join(
        [found["measure"], *(f"{name.removeprefix('item.')} {value}" for name, value in found["by"].items())]
    )


def _mean_cell(cell: Mapping[str, Any] | None, most: float) -> Any:
    return "–" if cell is None else _shaded(cell["mean"]["value"], most, interval(cell["mean"], 2))


SECTIONS = {
    "outcome_table": outcome_table,
    "moments": moments,
    "logprob_summary": logprob_summary,
    "probe_eval": probe_eval,
    "routing_stats": routing_stats,
    "similarity": similarity,
}
