"""Sites, layers and widths of the models of a sweep, known from their architecture before any weights are there.

`check` refuses what a model does not have. Where an architecture cannot be known here (a hub out of reach, a family
without a table) it refuses nothing: the replica that loads the model will.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from interlens import preview
from interlens.errors import CannotLoad, UnknownSite
from interlens.interp.locate import resolve_layers, site_width
from interlens.interp.sites import find_family

from ..config.schema import SweepConfig
from ..errors import ConfigError
from . import model_sizes

EVERYWHERE = ("residual",)
"""Sites that every model has at every layer, in the model's width: nothing has to be built for them."""


def check(configs: Iterable[SweepConfig]) -> None:
    """ConfigError for a site that a model of these configurations does not have, there or at all."""
    seen = set()
    for config in configs:
        for asked in _asked(config):
            where, who, model, site, layers = asked
            key = (model_sizes.model(config, model).source, site, layers)
            if key in seen:
                continue
            seen.add(key)
            skeleton = _skeleton(config, model)
            if skeleton is None:
                continue

            try:
                resolve_layers(skeleton, layers, site)
            except UnknownSite as error:
                raise ConfigError(f"{where}: {error} ({who}: {model})") from None


def width(config: SweepConfig, model: str | None, site: str, layer: int) -> int | None:
    """Values per token of a site that `check` has passed; None where it cannot be known here."""
    if site in EVERYWHERE:
        shape = model_sizes.of(config, model)
        return shape.width if shape else None
    skeleton = _skeleton(config, model or "")
    if skeleton is None:
        return None

    return site_width(skeleton, site, layer)


def _asked(config: SweepConfig) -> Iterator[tuple[str, str, str, str, tuple[int, ...] | None]]:
    """(where, participant, model, site, layers) of every site that is not everywhere."""
    wanted = [(f"capture[{i}].sites", c.participants, c.sites, c.layers) for i, c in enumerate(config.capture)]
    wanted += [
        (f"intervention[{i}].site", e.participants, (e.site,), e.layers or None)
        for i, e in enumerate(config.intervention)
    ]
    for where, participants, sites, layers in wanted:
        for who in participants:
            for site in sites:
                if site not in EVERYWHERE:
                    yield where, who, config.scenario.participants[who].model or "", site, layers


def _skeleton(config: SweepConfig, model: str) -> Any:

    entry = model_sizes.model(config, model)
    try:
        found = preview.skeleton(entry.source, entry.revision)
    except CannotLoad:
        return None
    return found if find_family(found) is not None else None
