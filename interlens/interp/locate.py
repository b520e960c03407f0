"""What a given model has: its layers, its sites, and the layers and widths of each.

Everything here takes a model and finds the table of its family first. A model without a listed table gets one from its
declared structure, checked by the contracts of all sites before anything is offered.
"""

from __future__ import annotations

from contextlib import suppress
from weakref import WeakKeyDictionary, WeakSet

from torch import nn

from ..errors import UnknownSite
from ..given import Given, whole, wholes
from .contracts import check
from .declared import declared_family
from .families import Family, registry
from .sites import (
    PATTERN,
    ROOT_SITES,
    SITES,
    Locator,
    Place,
    canonical_site,
    find_decoder,
    find_family,
    split_name,
    unwrap,
)

_VERIFIED: WeakSet[nn.Module] = WeakSet()


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers in order, through PEFT and multimodal wrappers; AttributeError names a class without."""
    decoder, name = find_decoder(model)
    return list(getattr(decoder, name))


def num_layers(model: nn.Module) -> int:
    """How many decoder layers the model has."""
    return len(decoder_layers(model))


_DECLARED: WeakKeyDictionary[nn.Module, Family] = WeakKeyDictionary()


def family_of(model: nn.Module) -> Family:
    """The listed table, or for an unlisted transformers model one found from its declared structure and verified."""
    family, base = find_family(model) or _DECLARED.get(unwrap(model)), unwrap(model)
    if family is not None:
        return family
    if not hasattr(base, "_can_record_outputs") or not hasattr(base, "get_input_embeddings"):
        name = getattr(getattr(base, "config", None), "model_type", type(base).__name__)
        raise UnknownSite(
            f"no table of sites for the architecture {name!r}, and it declares no structure of its own; listed: "
            f"{', '.join(sorted(registry()))}; add a file to interlens/interp/families or call register_family"
        )
    family = declared_family(base, *find_decoder(base))
    check(Locator(base, family))
    _DECLARED[base] = family
    return family


def locator(model: nn.Module) -> Locator:
    """Finds places in this model as it is now; UnknownSite for an architecture without a table that declares nothing."""
    return Locator(model, family_of(model))


def verify(model: nn.Module, tokens: int = 4) -> dict[str, str]:
    """Check every site's contract with one forward of 2 x `tokens` tokens; {refused site: reason}, usually empty.

    Costs one tiny forward. ValueError for a model in train mode.
    """
    return check(locator(model), tokens)


def verify_once(model: nn.Module) -> None:
    """`verify`, the first time it is asked about this model. A model without sites is left to refuse them by name."""
    if unwrap(model) not in _VERIFIED:
        with suppress(UnknownSite, AttributeError):
            verify(model)
        _VERIFIED.add(unwrap(model))


def find_place(model: nn.Module, site: str, layer: int) -> Place | None:
    """Where this model has canonical `site` at `layer`, or None."""
    return locator(model).place(site, layer)


def layers_with(model: nn.Module, site: str) -> tuple[int, ...]:
    """Layers at which this model has canonical `site`; root sites have one."""
    return locator(model).layers_with(site)


def sites_of(model: nn.Module) -> tuple[str, ...]:
    """Canonical names of the sites that at least one layer of this model has."""
    return locator(model).sites()


def require_site(model: nn.Module, site: str) -> str:
    """Canonical name of a site this model has; UnknownSite lists those it has."""
    name, at = canonical_site(site), locator(model)
    if not at.layers_with(name):
        reason = at.refused.get(name) or at.family.lacks.get(name)
        why = f" ({reason})" if reason else ""
        raise UnknownSite(f"no site {site!r} for {at.config.model_type!r}{why}; it has: {', '.join(at.sites())}")
    return name


def resolve_layers(model: nn.Module, layers: Given, site: str = "residual") -> tuple[int, ...]:
    """Absolute layers, in the order given, for `site` (canonical or alias) of `model`.

    None is every layer that has the site; negatives count from the end. `embed`, `final_norm` and `logits` have one
    place each, whatever `layers` says. An alias that names a layer (`blocks.12.hook_q`) is that layer.
    UnknownSite names the range, or the layers that have the site.
    """
    named = split_name(site)[1]
    site = require_site(model, site)
    have, count = layers_with(model, site), num_layers(model)
    if site in ROOT_SITES:
        return have
    if named is not None:
        layers = (named,) if layers is None else layers
    if layers is None:
        return have
    wanted = wholes(layers, "layers (None: all)")
    if not wanted:
        raise UnknownSite("no layer given; give at least one, or None for all")
    result = []
    for layer in wanted:
        if not -count <= layer < count:
            raise UnknownSite(
                f"no layer {layer!r}: this model has {count} layers, 0 to {count - 1} (or -{count} to -1)"
            )
        if layer % count not in have:
            raise UnknownSite(f"layer {layer} has no site {site!r}; layers that have it: {', '.join(map(str, have))}")
        result.append(layer % count)
    if named is not None and result != [named]:
        raise UnknownSite(f"the site name says layer {named}, layers= says {list(wanted)}; give one of them")
    return tuple(dict.fromkeys(result))


def site_width(model: nn.Module, site: str, layer: Given = 0) -> int:
    """Width of the last axis of `site` at `layer`."""
    at, site, layer = locator(model), require_site(model, site), whole(layer, "layer")
    layer = at.home(site)[0] if site in ROOT_SITES else layer % len(at.layers)
    if at.place(site, layer) is None:
        raise UnknownSite(f"layer {layer} has no site {site!r}; layers that have it: {at.layers_with(site)}")
    return at.width(site, layer)


def describe(model: nn.Module) -> str:
    """A table of this model's sites: name, layers, width, module and meaning."""
    count = num_layers(model)
    lines = [
        f"{type(unwrap(model)).__name__}: {count} layers",
        f"{'site':<14}{'layers':<12}{'width':<8}{'where':<42}meaning",
    ]
    for site in sites_of(model):
        have = layers_with(model, site)
        shown = (
            "all" if len(have) == count else ",".join(map(str, have)) if len(have) < 6 else f"{len(have)} of {count}"
        )
        place = find_place(model, site, have[0])
        assert place is not None
        point = place.point
        whole = "model" if site == "logits" else "layer"
        where = f"{'input of' if point.end == 'in' else 'output of'} {point.path or whole}"
        lines.append(f"{site:<14}{shown:<12}{site_width(model, site, have[0]):<8}{where:<42}{SITES[site]}")
    lines.append(f"{PATTERN}: [heads, S, S], asked for by name in capture_activations, with attention='eager' only")
    return "\n".join(lines)
