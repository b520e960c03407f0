"""The page of a run: one HTML file without scripts and without anything to fetch."""

from __future__ import annotations

import json
from collections import Counter
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..aggregates.shards import ShardedRun
from ..folder import names
from ..folder.local import whole_file
from ..folder.results import read_results, reading
from ..folder.store import Remote
from .charts import Point, Series, chart
from .findings import same_measure, sentences, title
from .markup import Markup, interval, join, number, table, tag, text
from .sections import SECTIONS
from .transcripts import tree

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Enforced by the browser: no script, image, font or connection, whatever a model has written."""


def write_report(run: ShardedRun, path: str | Path | None = None) -> Path | Remote:
    """Write the page of `run` (default `RUN/report/index.html`) and return where it is. No external requests."""
    data = render(run).encode("utf-8")
    if path is None:
        run.store.replace(names.REPORT, data)
        return run.root / names.REPORT
    with whole_file(path) as out:
        out.write(data)
    return Path(path)


def render(run: ShardedRun) -> Markup:
    """The whole page."""
    name = run.config.experiment
    told: list[tuple[str, Markup]] = []
    for aggregate, result in read_results(run.store).items():
        with reading(run.store, aggregate):
            told += _result(result)
    sections = [
        ("What the results say", tag("ul", *[tag("li", line) for line in sentences(run)])),
        *told,
        ("Failures", _failures(run)),
        ("Conversations", tree(run, run.config.report.transcripts)),
        ("Settings", _settings(run)),
    ]
    kept = [(heading, body) for heading, body in sections if body is not None]
    links = [tag("a", heading, href=f"#s{i}") for i, (heading, _) in enumerate(kept)]
    body = [tag("section", tag("h2", heading), part, id=f"s{i}") for i, (heading, part) in enumerate(kept)]
    banner = tag("header", tag("h1", name), tag("p", _summary(run), class_="quiet"), tag("nav", *links))
    return _document(f"{name}: report", banner, tag("main", *body))


def _document(heading: str, *body: Markup) -> Markup:
    """A whole page that fetches nothing."""
    style = Markup(files("sweeps.report").joinpath("style.css").read_text())
    head = tag(
        "head", tag("meta", charset="utf-8"), tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"), tag("title", heading),
        tag("style", style),
    )  # fmt: skip
    return Markup("<!doctype html>\n" + tag("html", head, tag("body", *body), lang="en"))


def section(result: dict[str, Any]) -> Markup:
    """A page with the tables and charts of one result."""
    parts = [tag("section", tag("h2", heading), body) for heading, body in _result(result)]
    return _document(result["name"], tag("main", *parts))


def overview(run: ShardedRun) -> Markup:
    """What a run is, in a few lines."""
    lines = tag("ul", *[tag("li", line) for line in sentences(run)])
    return join([tag("p", tag("b", run.config.experiment), " · ", _summary(run)), lines])


def _summary(run: ShardedRun) -> str:
    states = Counter(run.cells.column("state").to_pylist())
    shown = ", ".join(f"{number(states[s])} {s}" for s in ("done", "failed", "pending") if states[s])
    cast = ", ".join(f"{n} ({p.model or p.kind})" for n, p in run.config.scenario.participants.items())
    return f"{shown or 'no cells'} · {cast} · {run.store}"


def _result(result: dict[str, Any]) -> list[tuple[str, Markup]]:
    kind = result.get("kind")
    if kind == "outcomes":
        return _outcomes(result)
    if "directions" in result:
        return _directions(result)
    if kind in SECTIONS:
        return [(_heading(result), SECTIONS[kind](result))]
    return [_plain(result)]


def _heading(result: dict[str, Any]) -> str:
    """The kind, and the aggregate's own name where that is another."""
    kind = {"lda": "LDA"}.get(result["kind"], result["kind"].replace("_", " ").capitalize())
    return kind if result["name"] in (result["kind"], "directions") else f"{kind}: {result['name']}"


def _plain(result: dict[str, Any]) -> tuple[str, Markup]:
    shown = json.dumps(result, indent=1, ensure_ascii=False)
    return result["name"], tag("details", tag("summary", "values"), tag("pre", shown[:20_000]))


def _directions(result: dict[str, Any]) -> list[tuple[str, Markup]]:
    parts: list[Any] = [
        tag("p", "Positive: ", tag("code", result["positive"]), ", negative: ", tag("code", result["negative"]),
            f". Test scores come only from groups ({result['split']}) whose rows the direction has not seen."),
    ]  # fmt: skip
    entries = result["directions"]
    for where in dict.fromkeys((e["participant"], e["site"], e.get("selection", "")) for e in entries):
        here = [e for e in entries if (e["participant"], e["site"], e.get("selection", "")) == where]
        named = ", ".join(where[: 3 if where[2] else 2])
        parts.append(tag("h3", named))
        method = result["kind"].replace("_", " ")
        parts.append(_auroc_chart(here, f"Held-out AUROC by layer, {named}", method))
        parts.append(_direction_table(here))
        warnings = dict.fromkeys(w for e in here for w in (e.get("evaluation") or {}).get("warnings", ()))
        parts += [tag("p", f"Warning: {warning}.", class_="warning") for warning in warnings]
    if result.get("cosines"):
        names, values = result["cosines"]["names"], result["cosines"]["values"]
        rows = [[name, *[number(v, 2) for v in row]] for name, row in zip(names, values, strict=True)]
        parts.append(tag("details", tag("summary", "cosines between the directions"), table(["", *names], rows)))
    return [(_heading(result), join(parts))]


def _auroc_chart(entries: list[dict[str, Any]], heading: str, method: str) -> Markup:
    known = [e for e in entries if e.get("evaluation") and e["evaluation"]["auroc"]["value"] is not None]

    def control(name: str, style: str) -> Series:
        points = [(e["layer"], e["evaluation"][name]) for e in known if e["evaluation"].get(name)]
        drawn = [Point(x=x, y=v["mean"], low=v["low"], high=v["high"]) for x, v in points]
        label = {"shuffled": "shuffled labels", "random": "random direction", "orthogonal": "orthogonal direction"}[
            name
        ]
        return Series(name=f"{label} (95 % of draws)", points=drawn, style=style, band=True)

    own = [(e["layer"], e["evaluation"]["auroc"]) for e in known]
    points = [Point(x=x, y=v["value"], low=v["low"], high=v["high"], label=f"layer {x}: {interval(v)}") for x, v in own]
    series = [control("orthogonal", "s4"), control("random", "s5"), control("shuffled", "s3")]
    series.append(Series(name=f"{method} (95 % interval over groups)", points=points, style="s0"))
    return chart(series, x_label="layer", y_label="held-out AUROC", title=heading, reference=0.5, y_range=(0, 1.03))


def _direction_table(entries: list[dict[str, Any]]) -> Markup:
    head = ["layer", "positive", "negative", "neither", "distance", "norm +", "norm −", "AUROC", "accuracy",
            "recall at 1 % FPR", "shuffled", "random", "orthogonal"]  # fmt: skip
    rows = []
    for e in entries:
        found = e.get("evaluation") or {}
        middle = {name: number((found.get(name) or {}).get("mean")) for name in ("shuffled", "random", "orthogonal")}
        separation = interval(found.get("auroc")) if found else e.get("why")
        rows.append([
            e["layer"], number(e["num_pos"]), number(e["num_neg"]), number(e["num_neither"]), number(e["norm"]),
            number(e.get("norm_pos")), number(e.get("norm_neg")), separation,
            number(found.get("accuracy")), number(found.get("recall_at_1_fpr")), middle["shuffled"], middle["random"],
            middle["orthogonal"],
        ])  # fmt: skip
    return table(head, rows, numeric=0)


def _outcomes(result: dict[str, Any]) -> list[tuple[str, Markup]]:
    if not result.get("responses"):
        return []
    levels, numeric = result["levels"], all(isinstance(v, int | float) for v in result["levels"])
    charts, rows = [], []
    for response in result["responses"]:
        if (together := same_measure(result, response))[0] is not response:
            continue
        series, slopes = [], []
        for number_of, one in enumerate(together):
            points = []
            for i, level in enumerate(one["levels"]):
                points.append(_change(level, float(level["level"]) if numeric else i))
                rows.append([title(one), number(level["level"]), level["count"], interval(level["mean"]),
                             interval(level["difference"]), level["pairs"] if level["difference"] else ""])  # fmt: skip
            style = ("s0", "s5", "s3", "s4", "s1", "s2")[number_of % 6]
            series.append(Series(name=title(one), points=[p for p in points if p], line=numeric, style=style))
            if one["slope"]:
                slopes.append(tag("p", f"slope per unit{_apart(one)}: {interval(one['slope'])}", class_="quiet"))
        note = ": steered at this layer, so it moves by construction" if response.get("steered_here") else ""
        drawn = chart(
            series, x_label=result["axis"], y_label=f"change from {number(result['baseline'])}",
            title=title(response) + note, size=(360, 230), reference=0.0,
            x_names=None if numeric else [str(level) for level in levels],
        )  # fmt: skip
        charts.append(tag("div", drawn, *slopes))
    head = ["measure", result["axis"], "cells", "mean", f"change from {number(result['baseline'])}, paired", "pairs"]
    explained = tag(
        "p", "Each point is the mean change of cells that share item, trunk, branch seed and every other axis, with a "
        "95 % bootstrap interval over items. The means themselves are under \"numbers\".",
    )  # fmt: skip
    body = join(
        [
            explained,
            tag("div", *charts, class_="charts"),
            tag("details", tag("summary", "numbers"), table(head, rows, 1)),
        ]
    )
    return [(f"Responses along {result['axis']}", body)]


def _apart(response: dict[str, Any]) -> str:
    by = ", ".join(str(value) for value in response.get("by", {}).values())
    return f" ({by})" if by else ""


def _change(level: dict[str, Any], x: float) -> Point | None:
    """The paired change at a level; the baseline itself is 0 by definition."""
    change = level["difference"]
    if change:
        label = f"{number(level['level'])}: {interval(change)}, {level['pairs']} pairs"
        return Point(x=x, y=change["value"], low=change["low"], high=change["high"], label=label)
    mean = level["mean"]
    return Point(x=x, y=0.0, label=f"{number(level['level'])}: {interval(mean)}") if mean else None


def _failures(run: ShardedRun) -> Markup | None:
    rows = run.table("failures").to_pylist()
    if not rows:
        return None
    kinds = Counter(row["error"] for row in rows)
    parts = []
    for error, count in kinds.most_common(20):
        first = next(row for row in rows if row["error"] == error)
        where = tag("p", "for example ", tag("code", first["cell"] or first["trunk"]), class_="quiet")
        head = tag("summary", tag("b", number(count)), " × ", error)
        parts.append(tag("details", head, where, tag("pre", first["traceback"] or "")))
    return join(parts)


def _settings(run: ShardedRun) -> Markup:
    shown = json.dumps(run.config.to_dict(), indent=1, ensure_ascii=False, default=str)
    return tag("details", tag("summary", "the configuration of this run"), tag("pre", text(shown)))
