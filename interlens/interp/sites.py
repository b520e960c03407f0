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
    return find_decoder(model)[0]


def find_decoder(model: nn.Module) -> tuple[nn.Module, str]:
    """The module that owns the list of decoder layers, and its name for them; AttributeError names a class without."""
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


def _submodule(owner: nn.Module, path: str) -> nn.Module | None:
    found: Any = owner
    for name in filter(None, path.split(".")):
        found = getattr(found, name, None)
        if not isinstance(found, nn.Module):
            return None
    return found


_REFUSED: WeakKeyDictionary[nn.Module, dict[str, str]] = WeakKeyDictionary()


def refusals(model: nn.Module) -> dict[str, str]:
    """Sites that this very model broke the contract of (`contracts.verify`), with reasons."""
    return _REFUSED.setdefault(unwrap(model), {})


class Locator:
    """Finds places in one model as it is now, by the table of its family. Not kept: adapters may replace modules later.

    `locate.locator(model)` makes one with the right table.
    """

    def __init__(self, model: nn.Module, family: Family):
        self.base = unwrap(model)
        self.family = family
        self.config = text_config(model)
        self.refused = refusals(model)
        self.decoder, name = find_decoder(model)
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
        """Layers at which canonical `site` is; root sites have one."""
        return tuple(layer for layer in self.home(site) if self.place(site, layer) is not None)

    def sites(self) -> tuple[str, ...]:
        """Canonical names of the sites that at least one layer has."""
        return tuple(site for site in SITES if self.layers_with(site))


def _features(module: nn.Module, end: str) -> int:
    """Input or output width of a linear-like module (nn.Linear, Conv1D, a router's weight, an adapter around one)."""
    inner: Any = getattr(module, "base_layer", module)
    if type(inner).__name__ == "Conv1D":
        return int(inner.weight.shape[0 if end == "in" else 1])
    if hasattr(inner, "out_features"):
        return int(inner.in_features if end == "in" else inner.out_features)
    weight = inner.weight if hasattr(inner, "weight") else next(p for p in inner.parameters() if p.dim() == 2)
    return int(weight.shape[1 if end == "in" else 0])
