"""Who is recorded into which cache: open `capture` blocks, and the records of a turn handed out to those who asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .errors import UnsupportedIntervention
from .interp.activation_cache import ActivationCache, ActivationRecord, CaptureSpec, as_tuple
from .interp.locate import resolve_layers
from .interp.sites import canonical_site, split_name
from .participants.base import Participant
from .work import TurnOptions

UNLAYERED = ("embed", "final_norm", "logits")
"""Sites that `layers=` does not filter."""


@dataclass(eq=False)
class Capturing:
    """One `conv.capture` block that is open."""

    spec: CaptureSpec
    cache: ActivationCache
    names: frozenset[str]
    """The participants it records."""
    branched: bool = False
    """A branch was made meanwhile, which it does not record."""


def refuse(speaker: Participant, options: TurnOptions) -> None:
    """Raise UnsupportedIntervention where this participant cannot serve what is asked of it, UnknownSite for a site
    that no record holds ("pattern")."""
    if speaker.capturable:
        for spec in as_tuple(options.capture):
            check_sites(spec)
        return
    asked = {
        "capture": as_tuple(options.capture), "steering": as_tuple(options.steering),
        "patch": as_tuple(options.patch), "logprobs": options.return_logprobs, "forced": options.forced is not None,
    }  # fmt: skip
    wanted = [name for name, value in asked.items() if value]
    if wanted:
        raise UnsupportedIntervention(
            f"{', '.join(wanted)} asked of {speaker.name!r}, a {type(speaker).__name__}, whose inside cannot be "
            "reached; only local models can: drop it, or make this participant a ModelParticipant"
        )


def check_sites(spec: CaptureSpec) -> None:
    """UnknownSite for a site that no record holds: "pattern" is for `capture_activations`."""
    for site in spec.sites:
        canonical_site(site)


def check_places(spec: CaptureSpec, participant: Participant) -> None:
    """UnknownSite for a site or layer that the participant's model does not have, as far as it is known by now."""
    anywhere = spec.layers is None and tuple(spec.sites) == ("residual",)
    if not anywhere and (model := participant.outline()) is not None:
        for site in spec.sites:
            resolve_layers(model, spec.layers, site)


def by_spec(
    records: list[ActivationRecord], specs: Sequence[CaptureSpec], num_layers: int | None
) -> list[list[ActivationRecord]]:
    """The records of each spec. An engine gives, in the order of specs, one record per spec, layer and site."""
    found: list[list[ActivationRecord]] = [[] for _ in specs]
    seen: dict[tuple, int] = {}
    sites = [{canonical_site(site) for site in spec.sites} for spec in specs]
    layers = [_layers_of(spec, num_layers) for spec in specs]
    for record in records:
        takers = [
            n for n, spec in enumerate(specs)
            if record.site in sites[n] and record.pool == spec.pool and record.selection == str(spec.tokens)
            and (record.site in UNLAYERED or (wanted := layers[n]) is None or record.layer in wanted)
        ]  # fmt: skip
        key = (record.site, record.layer, record.pool, record.selection)
        if takers:
            found[takers[min(seen.get(key, 0), len(takers) - 1)]].append(record)
        seen[key] = seen.get(key, 0) + 1
    return found


def _layers_of(spec: CaptureSpec, num_layers: int | None) -> set[int] | None:
    named = {layer for _, layer in map(split_name, spec.sites) if layer is not None}
    if named or spec.layers is None:
        return named or None
    return {n + num_layers if n < 0 and num_layers else n for n in spec.layers}
