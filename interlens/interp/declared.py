"""Sites of an architecture without a table, from what transformers declares about it and from the laws themselves.

transformers models declare which class their decoder layers, attention and routers have. One tiny forward with a hook
on every part of every layer then shows which two parts' outputs add up with the layer's input to its output: those are
its contributions. What no law confirms is not offered.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from .families import Family, Point, into, out

_NORMS = ("norm", "ln_f", "final_layernorm", "final_layer_norm", "norm_f", "final_norm", "embedding_norm")
_OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj")


def declared_family(model: Any, decoder: nn.Module, name: str) -> Family:
    """A table for this very model, whose layers are `decoder.<name>`."""
    layers = list(getattr(decoder, name))
    points: dict[str, Point | tuple[Point, ...]] = {"resid_pre": into(""), "residual": out(""), "logits": out("")}
    embedding = model.get_input_embeddings()
    points["embed"] = tuple(out(path) for path, module in decoder.named_modules() if module is embedding)
    points["final_norm"] = tuple(out(norm) for norm in _NORMS)
    declared = dict(getattr(model, "_can_record_outputs", None) or {})
    attention = _paths(layers, declared.get("attentions"))
    mixers = tuple(out(path) for path in attention)
    contributions = _contributions(model, layers)
    points |= {site: found for site, found in contributions.items() if found}
    if not contributions.get("attn") and mixers:
        points["attn"] = mixers
    for part in "qkv":
        points[part] = tuple(out(f"{path}.{part}_proj") for path in attention)
    points["head_out"] = tuple(into(f"{path}.{end}") for path in attention for end in _OUTPUTS)
    points |= _routing(layers, declared.get("router_logits"))
    return Family(model_types=(), points=points, layers=name)


def _classes(declaration) -> tuple[type, ...]:
    found = declaration if isinstance(declaration, (list, tuple)) else [declaration]
    classes = [getattr(item, "target_class", item) for item in found]
    return tuple(c for c in classes if isinstance(c, type))


def _paths(layers: list[nn.Module], declaration) -> list[str]:
    classes = _classes(declaration)
    paths = [
        path for layer in layers for path, m in layer.named_modules() if path and classes and isinstance(m, classes)
    ]
    return list(dict.fromkeys(paths))


def _routing(layers: list[nn.Module], declaration) -> dict[str, tuple[Point, ...]]:
    """Routers whose logits are their first result, and the experts beside them."""
    if declaration is None or getattr(declaration, "index", 0) != 0:
        return {}
    paths = _paths(layers, declaration)
    beside = [f"{path.rpartition('.')[0]}.experts".lstrip(".") for path in paths]
    return {
        "router": tuple(Point(path=path, end="linear") for path in paths),
        "expert_mix": tuple(out(path) for path in dict.fromkeys(beside)),
    }


def _contributions(model: nn.Module, layers: list[nn.Module]) -> dict[str, tuple[Point, ...]]:
    """Per kind of layer: which children's outputs are added to the stream, and which child reads it in between."""
    kinds: dict[tuple[str, ...], nn.Module] = {}
    for layer in layers:
        kinds.setdefault(tuple(child for child, _ in layer.named_children()), layer)
    found: dict[str, list[Point]] = {"attn": [], "mlp": [], "resid_mid": []}
    for layer in kinds.values():
        reads, writes, pre, post = _watch(model, layer)
        if pre is None or post is None or pre.shape != post.shape:
            continue
        order = list(writes)
        for attn, mlp in product(order, order):
            if order.index(attn) >= order.index(mlp):
                continue
            if _equal(pre.double() + writes[attn].double() + writes[mlp].double(), post):
                found["attn"].append(out(attn))
                found["mlp"].append(out(mlp))
                middle = [c for c in reads if _equal(pre.double() + writes[attn].double(), reads[c])]
                found["resid_mid"] += [into(c, in_place=True) for c in middle[:1]]
                break
    return {site: tuple(dict.fromkeys(points)) for site, points in found.items()}


def _watch(model: nn.Module, layer: nn.Module):
    """One tiny forward: what each child of `layer` reads and writes (copies), and what the layer itself does."""
    reads: dict[str, Tensor] = {}
    writes: dict[str, Tensor] = {}
    ends: list[Tensor] = []

    def first(value):
        value = value[0] if isinstance(value, (tuple, list)) and value else value
        return value.clone() if isinstance(value, Tensor) else None

    def watch(name):
        def hook(module, args, kwargs, output):
            given, result = first(kwargs.get("hidden_states", args)), first(output)
            if given is not None and given.dim() == 3:
                reads[name] = given
            if result is not None and ends and result.numel() == ends[0].numel():
                writes[name] = result.view_as(ends[0])

        return hook

    def begin(module, args, kwargs):
        if (value := first(kwargs.get("hidden_states", args))) is not None:
            ends.append(value)

    handles = [layer.register_forward_pre_hook(begin, with_kwargs=True)]
    handles += [m.register_forward_hook(watch(n), with_kwargs=True) for n, m in layer.named_children()]
    handles.append(layer.register_forward_hook(lambda m, a, output: ends.append(first(output))))
    try:
        with torch.no_grad():
            device = next(model.parameters()).device
            model(input_ids=torch.arange(3, 9, device=device).view(2, 3), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return reads, writes, ends[0] if ends else None, ends[1] if len(ends) > 1 else None


def _equal(total: Tensor, expected: Tensor | None) -> bool:
    if expected is None or total.shape != expected.shape:
        return False
    eps = torch.finfo(expected.dtype).eps
    return bool(((total - expected.double()).norm(dim=-1) <= 8 * eps * expected.double().norm(dim=-1)).all())
