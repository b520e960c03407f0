"""The sites of a transformer and where a given model has them.

A site is a row of `SITES`; where it is in a family is a row of that family's table (`families/`). Layer indices are
true decoder indices, 0-based. `embed` lives under layer 0, `final_norm` and `logits` under the last layer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

from torch import nn

from ..errors import UnknownSite
from .families import Family, Point, registry

Site = Literal[
    "embed", "resid_pre", "resid_mid", "residual", "attn", "mlp", "q", "k", "v", "head_out", "router", "expert_mix",
    "shared_expert", "final_norm", "logits",
]  # fmt: skip

SITES: dict[str, str] = {
    "embed": "output of the token embedding, its scale included, before positions are added",
    "resid_pre": "the residual stream that a layer reads",
    "resid_mid": "the residual stream between attention and MLP",
    "residual": "the output of a decoder layer, before any final norm",
    "attn": "what attention adds to the residual stream",
    "mlp": "what the MLP or expert block adds to the residual stream",
    "q": "query projection, flat, before q norm and rotary",
    "k": "key projection, flat, before k norm and rotary",
    "v": "value projection, flat",
    "head_out": "the heads' outputs, flat, before the output projection",
    "router": "router logits over experts, before selection",
    "expert_mix": "the weighted sum of the routed experts",
    "shared_expert": "what the shared expert adds to the routed ones",
    "final_norm": "output of the final norm",
    "logits": "the model's logits",
}
PATTERN = "pattern"
"""What heads attend to, [heads, S, S]: no [tokens, width] as every site is, so only `capture_activations` reads it."""
ROOT_SITES = ("embed", "final_norm", "logits")
_STREAM_SITES = ("resid_pre", "resid_mid", "residual", "attn", "mlp", "expert_mix", "shared_expert", "final_norm")
_ALIASES = {
    "resid_post": "residual",
    "hook_embed": "embed",
    "hook_resid_pre": "resid_pre",
    "hook_resid_mid": "resid_mid",
    "hook_resid_post": "residual",
    "hook_attn_out": "attn",
    "hook_mlp_out": "mlp",
    "attn.hook_q": "q",
    "attn.hook_k": "k",
    "attn.hook_v": "v",
    "attn.hook_z": "head_out",
    "ln_final.hook_normalized": "final_norm",
    "unembed.hook_out": "logits",
}
_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")
_INNER = ("model", "language_model", "text_model", "transformer", "gpt_neox", "decoder")
_LAYER_LISTS = ("layers", "h", "blocks", "block")


class Place(NamedTuple):
    """One site of one layer of one model: the module to hook and how."""

    layer: int
    site: str
    owner: nn.Module
    """The decoder layer (for root sites: the text decoder)."""
    module: nn.Module
    point: Point


def split_name(name: str) -> tuple[str, int | None]:
    """Canonical site and, for names such as `blocks.12.hook_resid_post`, the layer it names. Else UnknownSite."""
    layer, rest = None, name
    if match := _BLOCK.fullmatch(str(name)):
        layer, rest = int(match[1]), match[2]
    site = _ALIASES.get(rest, rest)
    if site in (PATTERN, "attn.hook_pattern"):
        raise UnknownSite(
            f"the site {name!r} is [heads, S, S], not [tokens, width]: no engine, conversation, record or hook holds it, "
            "and nothing edits it; read it with capture_activations(model, input_ids, CaptureSpec(sites=('pattern',))) "
            "on a model with attention='eager'"
        )
    if site not in SITES:
        raise UnknownSite(
            f"no site {name!r}; sites: {', '.join(SITES)}; also TransformerLens names (blocks.0.hook_resid_post)"
        )
    return site, layer


def site_at(name: str, layers: Sequence[int]) -> str:
    """Canonical site for an edit at `layers`; ValueError if the name says another layer (`blocks.3.hook_q`)."""
    site, named = split_name(name)
    if named is not None and list(layers) != [named]:
        raise ValueError(f"the site {name!r} names layer {named}, but the layers given are {list(layers)}")
    return site


def canonical_site(name: str) -> str:
    """The canonical name of a site or of one of its aliases (resid_post, `blocks.N.hook_*`); UnknownSite otherwise."""
    return split_name(name)[0]


def unwrap(model: nn.Module) -> nn.Module:
    """The transformers model inside wrappers (PEFT); adapters stay in force."""
    inner: Any = model
    while hasattr(inner, "get_base_model") and hasattr(inner, "peft_config"):
        inner = inner.get_base_model()
    return inner


def text_config(model: nn.Module):
    """Configuration of the text decoder, also of a multimodal model."""
    config: Any = unwrap(model).config
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def find_family(model: nn.Module) -> Family | None:
    """The table of this model's architecture, or None if it is not listed."""
    config = getattr(unwrap(model), "config", None)
    if config is None:
        return None
    table = registry()
    return table.get(getattr(text_config(model), "model_type", None)) or table.get(getattr(config, "model_type", None))


def text_decoder(model: nn.Module) -> nn.Module:
    """The module that owns the list of decoder layers."""
    return _find_decoder(model)[0]


def _find_decoder(model: nn.Module) -> tuple[nn.Module, str]:
    family = find_family(model)
    names = (family.layers,) if family else _LAYER_LISTS
    module = unwrap(model)
    for _ in range(6):
        for name in names:
            if isinstance(getattr(module, name, None), nn.ModuleList):
                return module, name
        module = next((m for n in _INNER if isinstance(m := getattr(module, n, None), nn.Module)), None)
        if module is None:
            break
    raise AttributeError(
        f"no decoder layers in {type(unwrap(model)).__name__}: looked for {', '.join(names)} inside it"
    )


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers in order, through PEFT and multimodal wrappers; AttributeError names a class without."""
    decoder, name = _find_decoder(model)
    return list(getattr(decoder, name))


def num_layers(model: nn.Module) -> int:
    return len(decoder_layers(model))


def _submodule(owner: nn.Module, path: str) -> nn.Module | None:
    found: Any = owner
    for name in filter(None, path.split(".")):
        found = getattr(found, name, None)
        if not isinstance(found, nn.Module):
            return None
    return found


_REFUSED: WeakKeyDictionary[nn.Module, dict[str, str]] = WeakKeyDictionary()
_DECLARED: WeakKeyDictionary[nn.Module, Family] = WeakKeyDictionary()


def refusals(model: nn.Module) -> dict[str, str]:
    """Sites that this very model broke the contract of (`contracts.verify`), with reasons."""
    return _REFUSED.setdefault(unwrap(model), {})


def _family_of(model: nn.Module) -> Family:
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
    from .contracts import verify
    from .declared import declared_family

    _DECLARED[base] = declared_family(base, *_find_decoder(base))
    try:
        verify(base)
    except BaseException:
        del _DECLARED[base]
        raise
    return _DECLARED[base]


class Locator:
    """Finds places in one model as it is now. Not kept: adapters may replace modules later."""

    def __init__(self, model: nn.Module):
        self.base = unwrap(model)
        self.family = _family_of(model)
        self.config = text_config(model)
        self.refused = refusals(model)
        self.decoder, name = _find_decoder(model)
        self.layers: list[nn.Module] = list(getattr(self.decoder, name))

    def home(self, site: str) -> range:
        """The layers under which `site` may be filed."""
        last = len(self.layers) - 1
        return {"embed": range(1), "final_norm": range(last, last + 1), "logits": range(last, last + 1)}.get(
            site, range(last + 1)
        )

    def place(self, site: str, layer: int) -> Place | None:
        """Where canonical `site` is at `layer`, or None."""
        if layer not in self.home(site) or site in self.refused:
            return None
        owner = self.decoder if site in ROOT_SITES else self.layers[layer]
        start = self.base if site == "logits" else owner
        for point in self.family.candidates(site):
            module = _submodule(start, point.path)
            if module is not None and (point.when is None or point.when(self.config)):
                return Place(layer, site, owner, module, point)
        return None

    def width(self, site: str, layer: int) -> int:
        """Width of the last axis of a site that is there."""
        place = self.place(site, layer)
        assert place is not None
        if site in _STREAM_SITES:
            return self.config.hidden_size
        if site == "logits":
            base: Any = self.base
            return int(base.get_output_embeddings().weight.shape[0])
        if site == "embed":
            module: Any = place.module
            return int(module.weight.shape[-1])
        full = _features(place.module, place.point.end)
        return full if place.point.columns is None else len(place.point.columns(place.owner, full))

    def layers_with(self, site: str) -> tuple[int, ...]:
        return tuple(layer for layer in self.home(site) if self.place(site, layer) is not None)

    def sites(self) -> tuple[str, ...]:
        return tuple(site for site in SITES if self.layers_with(site))


def find_place(model: nn.Module, site: str, layer: int) -> Place | None:
    """Where this model has canonical `site` at `layer`, or None."""
    return Locator(model).place(site, layer)


def layers_with(model: nn.Module, site: str) -> tuple[int, ...]:
    """Layers at which this model has canonical `site`; root sites have one."""
    return Locator(model).layers_with(site)


def sites_of(model: nn.Module) -> tuple[str, ...]:
    """Canonical names of the sites that at least one layer of this model has."""
    return Locator(model).sites()


def require_site(model: nn.Module, site: str) -> str:
    """Canonical name of a site this model has; UnknownSite lists those it has."""
    name, at = canonical_site(site), Locator(model)
    if not at.layers_with(name):
        reason = at.refused.get(name) or at.family.lacks.get(name)
        why = f" ({reason})" if reason else ""
        raise UnknownSite(f"no site {site!r} for {at.config.model_type!r}{why}; it has: {', '.join(at.sites())}")
    return name


def resolve_layers(model: nn.Module, layers: int | Sequence[int] | None, site: str = "residual") -> tuple[int, ...]:
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
    wanted = (layers,) if isinstance(layers, int) else tuple(layers)
    if not wanted:
        raise UnknownSite("no layer given; give at least one, or None for all")
    result = []
    for layer in wanted:
        if not isinstance(layer, int) or isinstance(layer, bool) or not -count <= layer < count:
            raise UnknownSite(
                f"no layer {layer!r}: this model has {count} layers, 0 to {count - 1} (or -{count} to -1)"
            )
        if layer % count not in have:
            raise UnknownSite(f"layer {layer} has no site {site!r}; layers that have it: {', '.join(map(str, have))}")
        result.append(layer % count)
    if named is not None and result != [named]:
        raise UnknownSite(f"the site name says layer {named}, layers= says {list(wanted)}; give one of them")
    return tuple(dict.fromkeys(result))


def site_width(model: nn.Module, site: str, layer: int = 0) -> int:
    """Width of the last axis of `site` at `layer`."""
    at, site = Locator(model), require_site(model, site)
    layer = at.home(site)[0] if site in ROOT_SITES else layer % len(at.layers)
    if at.place(site, layer) is None:
        raise UnknownSite(f"layer {layer} has no site {site!r}; layers that have it: {at.layers_with(site)}")
    return at.width(site, layer)


def _features(module: nn.Module, end: str) -> int:
    """Input or output width of a linear-like module (nn.Linear, Conv1D, a router's weight, an adapter around one)."""
    inner: Any = getattr(module, "base_layer", module)
    if type(inner).__name__ == "Conv1D":
        return int(inner.weight.shape[0 if end == "in" else 1])
    if hasattr(inner, "out_features"):
        return int(inner.in_features if end == "in" else inner.out_features)
    return int(inner.weight.shape[1 if end == "in" else 0])


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
