"""What sites promise, checked on the model itself by one tiny forward: `verify(model)`.

Every site is reached and has its shape; `resid_pre + attn (+ mlp)` gives `resid_mid` (and `residual`); what a layer
writes is what the next one reads; routed and shared experts make the expert block's output; `final_norm` through the
head gives the logits. A site that breaks its promise is refused for this model from then on, by name and reason.
"""

from __future__ import annotations

from contextlib import suppress
from weakref import WeakSet

import torch
from torch import Tensor, nn

from ..errors import HookDidNotFire, UnknownSite
from .hooks import attached
from .lens import unembed
from .sites import Locator, refusals, text_config, unwrap

_VERIFIED: WeakSet[nn.Module] = WeakSet()
Values = dict[tuple[int, str], Tensor]


def verify(model: nn.Module, tokens: int = 4) -> dict[str, str]:
    """Check every site's contract with one forward of 2 x `tokens` tokens; {refused site: reason}, usually empty.

    Costs one tiny forward. The model must be in eval mode.
    """
    if model.training:
        raise ValueError("a model in train mode drops out at random: call model.eval() before verify")
    known = refusals(model)
    known.clear()
    at = Locator(model)
    keys = [(layer, site) for site in at.sites() for layer in at.layers_with(site)]
    values: Values = {}
    vocab = text_config(model).vocab_size
    ids = (torch.arange(2 * tokens).view(2, tokens) * 7 + 3) % vocab

    def keep(key):
        return lambda value: values.__setitem__(key, value.clone())

    with suppress(HookDidNotFire), torch.no_grad(), attached(model, {key: keep(key) for key in keys}):
        model(input_ids=ids.to(next(model.parameters()).device), use_cache=False)
    values = {key: value.cpu() for key, value in values.items()}
    refused: dict[str, str] = {}
    for check in (_shapes, _stream, _experts):
        for site, reason in check(at, values, (2, tokens)).items():
            refused.setdefault(site, reason)
    for site, reason in _head(model, at, values).items():
        refused.setdefault(site, reason)
    known.update(refused)
    return dict(refused)


def verify_once(model: nn.Module) -> None:
    """`verify`, the first time it is asked about this model. A model without sites is left to refuse them by name."""
    if unwrap(model) not in _VERIFIED:
        with suppress(UnknownSite, AttributeError):
            verify(model)
        _VERIFIED.add(unwrap(model))


def _close(total: Tensor, expected: Tensor, *parts: Tensor) -> bool:
    """Equal up to the rounding of a few operations on `parts` in their own dtype."""
    eps = torch.finfo(expected.dtype).eps
    scale = sum(part.double().norm(dim=-1) for part in (*parts, expected))
    return bool(((total.double() - expected.double()).norm(dim=-1) <= 4 * eps * scale).all())


def _shapes(at: Locator, values: Values, batch: tuple[int, int]) -> dict[str, str]:
    refused = {}
    for site in at.sites():
        for layer in at.layers_with(site):
            value = values.get((layer, site))
            if value is None:
                refused[site] = f"a forward does not reach it at layer {layer}"
            elif value.shape != (*batch, at.width(site, layer)):
                refused[site] = f"at layer {layer} it is {tuple(value.shape)}, not {(*batch, at.width(site, layer))}"
    return refused


def _stream(at: Locator, values: Values, batch) -> dict[str, str]:
    refused: dict[str, str] = {}
    for layer in range(len(at.layers)):
        pre, attn, mid, mlp, post = (
            values.get((layer, site)) for site in ("resid_pre", "attn", "resid_mid", "mlp", "residual")
        )
        after = values.get((layer + 1, "resid_pre"))
        if post is not None and after is not None and not _close(post, after):
            for site in ("resid_pre", "residual"):
                refused.setdefault(site, f"what layer {layer} writes is not what layer {layer + 1} reads")
        if pre is None or attn is None or attn.shape != pre.shape:
            continue
        if mid is not None and not _close(pre.double() + attn.double(), mid, pre, attn):
            refused.setdefault("resid_mid", f"at layer {layer} it is not resid_pre + attn")
        if mlp is not None and post is not None:
            total = pre.double() + attn.double() + mlp.double()
            if total.shape != post.shape or not _close(total, post, pre, attn, mlp):
                for site in ("attn", "mlp"):
                    refused.setdefault(site, f"at layer {layer} resid_pre + attn + mlp is not residual")
    return refused


def _experts(at: Locator, values: Values, batch) -> dict[str, str]:
    refused: dict[str, str] = {}
    for layer in at.layers_with("expert_mix"):
        routed, mlp, shared = (values.get((layer, site)) for site in ("expert_mix", "mlp", "shared_expert"))
        if routed is None or mlp is None:
            continue
        total = routed.double() if shared is None else routed.double() + shared.double()
        if total.shape != mlp.shape:
            continue
        factor = (total * mlp).sum() / (total * total).sum().clamp_min(1e-30)  # some families scale the block's output
        if not _close(factor * total, mlp, factor * routed):
            for site in ("expert_mix", "shared_expert"):
                refused[site] = f"at layer {layer} routed and shared experts do not make the block's output"
    return refused


def _head(model: nn.Module, at: Locator, values: Values) -> dict[str, str]:
    last = len(at.layers) - 1
    normed, logits = values.get((last, "final_norm")), values.get((last, "logits"))
    if normed is None or logits is None:
        return {}
    with torch.no_grad():
        again = unembed(model, normed.to(next(model.parameters()).device)).cpu()
    if again.shape == logits.shape and _close(again, logits):
        return {}
    return {"final_norm": "through the head it does not give the logits"}
