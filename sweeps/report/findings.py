"""What the results of a run say, in plain sentences with their numbers, from `RUN/aggregates/` and the plan."""

from __future__ import annotations

from typing import Any

from ..aggregates.shards import ShardedRun
from ..analyzers import UNITS
from ..folder.results import read_results, reading
from .markup import interval, number
from .sections import table_title

LINES = 10


def sentences(run: ShardedRun) -> list[str]:
    """The closing lines of a run: cells, directions with their controls, responses with paired intervals."""
    lines = [counts(run)]
    for name, result in read_results(run.store).items():
        with reading(run.store, name):
            lines += said(result)
    return lines[:LINES]


def said(result: dict[str, Any]) -> list[str]:
    """What one result says; nothing where its kind has no sentence."""
    return SAID.get(result.get("kind", ""), _none)(result)


def counts(run: ShardedRun) -> str:
    """How many cells are done, failed and pending, and over how many items."""
    states = run.counts
    items = run.plan.num_items
    total = sum(states.values())
    line = f"{states['done']} of {total} cells finished, over {plural(items, 'item')}"
    line += f"; {states['failed']} failed" if states["failed"] else "; none failed"
    return line + (f"; {states['pending']} are still to run." if states["pending"] else ".")


def plural(count: int, noun: str) -> str:
    return f"{number(count)} {noun}{'' if count == 1 else 's'}"


def _none(result: dict[str, Any]) -> list[str]:
    return []


def _directions(result: dict[str, Any]) -> list[str]:
    entries = _evaluated(result)
    if not entries:
        whys = {entry.get("why") for entry in result["directions"]} - {None}
        return [f"No direction of {result['name']} could be evaluated: {'; '.join(sorted(whys)) or 'no records'}."]
    shown = entries[len(entries) // 2]
    found = shown["evaluation"]
    sides = f"{result['positive']} against {result['negative']}"
    curve = ", ".join(f"{e['layer']}: {number(e['evaluation']['auroc']['value'])}" for e in _same_place(entries, shown))
    article, one, where = "an", "answer", "answers"
    if not _is_said(shown):
        article, one, where = "a", "text", f"residual at {shown['selection']}"
    lines = [
        f"Reading {shown['participant']}'s {where}, a difference of means tells {sides} apart on items it has not seen "
        f"with AUROC by layer {curve} (0.5 is chance; {found['num_pos']} against {found['num_neg']} {one}s)."
    ]
    controls = [f"at layer {shown['layer']} {interval(found['auroc'])} with 95 % intervals over items"]
    if found.get("shuffled"):
        s = found["shuffled"]
        controls.append(f"shuffled labels give {number(s['mean'])} ({number(s['low'])} to {number(s['high'])})")
    if found.get("random"):
        r = found["random"]
        controls.append(f"random directions {number(r['mean'])} ({number(r['low'])} to {number(r['high'])})")
    if found.get("orthogonal"):
        o = found["orthogonal"]
        controls.append(f"directions orthogonal to it {number(o['mean'])} ({number(o['low'])} to {number(o['high'])})")
    lines.append(f"Controls: {'; '.join(controls)}.")
    lines.append(
        f"The two means are {number(shown['norm'])} apart at layer {shown['layer']}, where {article} {one}'s mean residual "
        f"has a norm of about {number(shown['norm_pos'])}."
    )
    return lines


def _is_said(entry: dict[str, Any]) -> bool:
    """Its records are of what a participant said, as far as its tokens tell; else of what it read too."""
    selection = entry.get("selection") or "generated"
    return any(word in selection for word in ("answer", "generated", "reasoning")) and "prompt" not in selection


def _evaluated(result: dict[str, Any]) -> list[dict]:
    """The directions whose held-out AUROC exists: there were test pairs."""
    scored = [entry for entry in result["directions"] if entry.get("evaluation")]
    return [entry for entry in scored if entry["evaluation"]["auroc"]["value"] is not None]


def _same_place(entries: list[dict], shown: dict) -> list[dict]:
    return [e for e in entries if all(e.get(n) == shown.get(n) for n in ("participant", "site", "selection"))]


def _outcomes(result: dict[str, Any]) -> list[str]:
    lines = []
    for response in _told(result):
        levels = response["levels"]
        means = ", ".join(
            f"{number(level['mean']['value'])} at {number(level['level'])}" for level in levels if level["mean"]
        )
        pairs = max(level["pairs"] for level in levels)
        where = " (steered there, so it moves by construction)" if response.get("steered_here") else ""
        told = f"{_capital(title(response))}{where}: {means}"
        slope = f"; slope {interval(response['slope'])} per unit" if response["slope"] else ""
        beside = "".join(f"; {_named(r)}, {_changes(r, result)}" for r in same_measure(result, response)[1:])
        lines.append(f"{told}; changes in {plural(pairs, 'pair')}, {_changes(response, result)}{slope}{beside}.")
    return lines


def _changes(response: dict[str, Any], result: dict[str, Any]) -> str:
    changes = []
    for level in response["levels"]:
        if change := level["difference"]:
            sure = "" if _excludes_zero(change) else ", not distinguishable from no change"
            changes.append(f"{number(result['baseline'])} to {number(level['level'])}: {_signed(change)}{sure}")
    return "; ".join(changes)


def _named(response: dict[str, Any]) -> str:
    return ", ".join(f"{path.rsplit('.', 1)[-1]} {value}" for path, value in response.get("by", {}).items())


def same_measure(result: dict[str, Any], response: dict[str, Any]) -> list[dict[str, Any]]:
    """The responses that measure what this one does, in order: what was found first, its controls after it."""
    return [r for r in result["responses"] if _titled(r) == _titled(response)]


def _told(result: dict[str, Any]) -> list[dict[str, Any]]:
    """At most six responses, text first: of the participants that were steered, if any were; few projections."""
    responses = [r for r in result["responses"] if any(level["mean"] for level in r["levels"])]
    responses = [r for r in responses if r is same_measure(result, r)[0]]
    steered = {r["participant"] for r in responses if r.get("steered_here")}
    if steered:
        responses = [r for r in responses if _whose(r) in (None, *steered)]
    text = [r for r in responses if r["of"] == "text"]
    projected = [r for r in responses if r["of"] == "projection"]
    edited = [i for i, r in enumerate(projected) if r["steered_here"]]
    kept = (
        projected[edited[0] :][:1] + projected[max(edited[0] + 1, len(projected) - 1) :] if edited else projected[-1:]
    )
    text.sort(key=lambda r: _order(r["measure"]))
    return text[:5] + kept


def _whose(response: dict[str, Any]) -> str | None:
    """The participant a response is about: of `enthusiasm.bob` bob; None for a measure of the whole cell."""
    return response.get("participant") or response["measure"].partition(".")[2] or None


def _order(measure: str) -> tuple[int, str]:
    """Measures that the package knows first, in their order; one measure of all participants together."""
    name, _, who = measure.partition(".")
    return (list(UNITS).index(name) if name in UNITS else len(UNITS), f"{name}.{who}")


def title(response: dict[str, Any]) -> str:
    """`enthusiasm.bob` as "bob's enthusiasm"; projections with their layer; what it was kept apart by in brackets."""
    by = _named(response)
    return f"{_titled(response)} [{by}]" if by else _titled(response)


def _titled(response: dict[str, Any]) -> str:
    if response["of"] == "projection":
        return f"{response['participant']}'s projection on the direction at layer {response['layer']}"
    measure, _, who = response["measure"].partition(".")
    said = f"{measure} {UNITS[measure]}" if UNITS.get(measure) else measure
    return f"{who}'s {said}" if who else said


def _capital(line: str) -> str:
    return line[:1].upper() + line[1:]


def _excludes_zero(found: dict[str, float]) -> bool:
    return found["low"] > 0 or found["high"] < 0


def _signed(found: dict[str, float]) -> str:
    return ("+" if found["value"] > 0 else "") + interval(found)


def _probe(result: dict[str, Any]) -> list[str]:
    """One line for a probe beside the difference of means."""
    entries = _evaluated(result)
    curve = ", ".join(f"{e['layer']}: {number(e['evaluation']['auroc']['value'])}" for e in entries)
    return [f"{KINDS[result['kind']]}, {result['contrast']}: held-out AUROC by layer {curve}."] if entries else []


def _probe_eval(result: dict[str, Any]) -> list[str]:
    evaluated = [e for e in result["probes"] if e["evaluation"]]
    told = [f"{e['method'].replace('_', ' ')} {interval(e['evaluation']['auroc'])}" for e in evaluated]
    lines = [f"With the layer chosen without the test items: {'; '.join(told)}."] if told else []
    return lines + [f"Warning: {warning}." for warning in result["warnings"]]


def _logprobs(result: dict[str, Any]) -> list[str]:
    entries = result["summary"][:4]
    told = [f"{e['participant']} {' '.join(map(str, e['by'].values()))}: {number(e['surprisal'])}" for e in entries]
    return [f"Surprisal in nats per token: {', '.join(told)}."] if told else []


def _routing(result: dict[str, Any]) -> list[str]:
    """The largest difference between two values of `by`, and the mean one."""
    found = result["comparisons"]
    if not found:
        return []
    most = max(found, key=lambda c: c["js_divergence"])
    mean = sum(c["js_divergence"] for c in found) / len(found)
    a, b = (", ".join(f"{name} {number(value)}" for name, value in most[side].items()) for side in "ab")
    return [
        f"{result['name']}: {most['participant']}'s routing differs most between {a} and {b} at layer {most['layer']}, by a "
        f"JS divergence of {number(most['js_divergence'])} nats (mean over layers {number(mean)}; "
        f"{round(most['topk_overlap'] * most['k'])} of the top {most['k']} experts in common)."
    ]


def _outcome_table(result: dict[str, Any]) -> list[str]:
    """Of the first measure, of the values of `by` with most cells: its largest mean in each column, and in which row."""
    found = next((found for found in result["tables"] if found["cells"]), None)
    if found is None:
        return []
    order, columns = result["row_levels"].index, list(dict.fromkeys(cell["column"] for cell in found["cells"]))
    lowest = min(cell["mean"]["value"] for cell in found["cells"])
    told, where, others = f"{result['name']}: {table_title(found)}", [], []
    row, column = (str(result[side]).rsplit(".", 1)[-1] for side in ("rows", "columns"))
    for at in columns:
        cells = sorted((cell for cell in found["cells"] if cell["column"] == at), key=lambda cell: order(cell["row"]))
        most = max(cell["mean"]["value"] for cell in cells)
        first = [cell for cell in cells if cell["mean"]["value"] == most]
        rows = "every" if len(first) == len(cells) > 1 else ", ".join(number(cell["row"]) for cell in first)
        said = f"{interval(first[0]['mean'], 2)} at {row} {rows}" + f" with {column} {number(at)}" * (at is not None)
        (where if most > lowest else others).append((most, said))
    if not where:
        return [f"{told} is {number(lowest)} everywhere."]
    where.sort(key=lambda pair: -pair[0])
    rest = max((most for most, _ in [*where[3:], *others]), default=None)
    end = "" if rest is None else f"; for other {column} at most {number(rest, 2)}"
    return [f"{told} is largest with {'; '.join(said for _, said in where[:3])}{end}."]


KINDS = {"lda": "LDA", "logistic": "Logistic regression"}

SAID = {
    "difference_of_means": _directions,
    "outcomes": _outcomes,
    "lda": _probe,
    "logistic": _probe,
    "probe_eval": _probe_eval,
    "logprob_summary": _logprobs,
    "routing_stats": _routing,
    "outcome_table": _outcome_table,
}
