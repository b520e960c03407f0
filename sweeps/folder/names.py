"""Every name in a run folder, spelt here alone (docs/data.md says what stands in each file)."""

from __future__ import annotations

RUN, PROGRESS, EVENTS, REPORT = "run.json", "progress.json", "events.jsonl", "report/index.html"

PLAN, INPUTS, COMMITS, LEASE, AGGREGATES, CAPTURES = "plan", "inputs", "_commits", "_lease", "aggregates", "captures"

ANALYSES = "analyses"


def config(part: int | str) -> str:
    """The settings with which a part of the plan entered."""
    return f"config-{part}.yaml"


def part(number: int | str) -> str:
    """A part of the plan."""
    return f"{PLAN}/part-{number}.parquet"


def retries(number: int) -> str:
    """A round of retries."""
    return f"{PLAN}/retries-{number}.json"


def items(part: int | str) -> str:
    """The items of a part of the plan."""
    return f"{INPUTS}/items-{part}.jsonl"


def direction(digest: str) -> str:
    """The copy of a direction."""
    return f"{INPUTS}/{digest}.safetensors"


def other_run(digest: str) -> str:
    """The folder with what patches read of another run."""
    return f"{INPUTS}/{digest}"


def commit(unit: str) -> str:
    """The commit of a unit."""
    return f"{COMMITS}/{unit}.json"


def lease(number: int) -> str:
    """A number of the lease."""
    return f"{LEASE}/{number}.json"


def events(number: int) -> str:
    """A part of the events where nothing can be appended."""
    return f"events-{number}.jsonl"


def result(aggregate: str) -> str:
    """What an aggregate found."""
    return f"{AGGREGATES}/{aggregate}.json"


def directions(aggregate: str = "directions") -> str:
    """The directions of an aggregate."""
    return f"{AGGREGATES}/{aggregate}.safetensors"


def arrays(aggregate: str) -> str:
    """The arrays of an aggregate."""
    return f"{AGGREGATES}/{aggregate}.arrays.safetensors"


def capture(name: str) -> str:
    """The folder of what `sweeps capture` added."""
    return f"{CAPTURES}/{name}"


def analysis(version: str) -> str:
    """What a version of `sweeps analyze` is."""
    return f"{ANALYSES}/{version}.json"


def analysed_unit(version: str, unit: str) -> str:
    """The outcomes of a committed unit by a version."""
    return f"{ANALYSES}/{version}/{unit}.parquet"


def table(table: str, shard: str) -> str:
    """A unit's rows of messages, outcomes, failures or routing. `shard`: `<unit>-<attempt>`."""
    return f"{table}/{shard}.parquet"


def records(model: str, site: str, shard: str) -> str:
    """A unit's records of a model's site; both percent-encoded."""
    return f"records/model={model}/site={site}/{shard}.parquet"


def activations(model: str, shard: str) -> str:
    """Tensors of a model, percent-encoded. `shard`: `<unit>-<attempt>-<k>`."""
    return f"activations/model={model}/{shard}.safetensors"


def sums(shard: str) -> str:
    """A unit's states of sums."""
    return f"stats/{shard}.safetensors"
