"""What sites promise, checked on the model itself by one tiny forward; `locate.verify(model)` asks for it.

Every site is reached and has its shape; `resid_pre + attn (+ mlp)` gives `resid_mid` (and `residual`); what a layer
writes is what the next one reads; routed and shared experts make the expert block's output; `final_norm` through the
head gives the logits. A site that breaks its promise is refused for this model from then on, by name and reason.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from .attach import Attachments, lock_of
from .head import logits_of
from .routers import check_routers
from .sites import Locator

Values = dict[tuple[int, str], Tensor]


def check(at: Locator, tokens: int = 4) -> dict[str, str]:
    """Check the contract of every site of one model; {refused site: reason}, which `at.refused` holds from then on.

    Costs one forward of 2 x `tokens` tokens. ValueError for a model in train mode.
    """
    if at.base.training:
        raise ValueError("a model in train mode drops out at random: call model.eval() before verify")
    at.refused.clear()
    values, refused = _values(at, tokens)
    at.refused.update(refused)
    if "router" not in refused and at.layers_with("router"):
        refused |= check_routers(at, _ids(at, tokens))
    for broken in (_shapes, _stream, _experts):
        for site, reason in broken(at, values, (2, tokens)).items():
            refused.setdefault(site, reason)
    for site, reason in _head(at, values).items():
        refused.setdefault(site, reason)
    at.refused.update(refused)
    return dict(refused)


def _ids(at: Locator, tokens: int) -> Tensor:
    ids = (torch.arange(2 * tokens).view(2, tokens) * 7 + 3) % at.config.vocab_size
    return ids.to(next(at.base.parameters()).device)


def _values(at: Locator, tokens: int) -> tuple[Values, dict[str, str]]:
    """What a forward over 2 rows of `tokens` tokens shows at every site that it reaches, on the CPU; and the sites
    where looking itself fails, with what they raise: each is then looked at alone, so that no other suffers."""
    try:
        return _seen(at, tokens, at.sites()), {}
    except Exception:
        values: Values = {}
        failed: dict[str, str] = {}
        for site in at.sites():
            try:
                values |= _seen(at, tokens, (site,))
            except Exception as error:
                failed[site] = f"looking at it fails: {type(error).__name__}: {error}"
        if len(failed) == len(at.sites()):
            raise
        return values, failed


def _seen(at: Locator, tokens: int, sites: tuple[str, ...]) -> Values:
    values: Values = {}

    def keep(key: tuple[int, str], value: Tensor) -> None:
        values[key] = value.clone()

    with lock_of(at.base), Attachments() as attachments, torch.no_grad():
        for site in sites:
            for layer in at.layers_with(site):
                place = at.place(site, layer)
                assert place is not None
                attachments.add(place, partial(keep, (layer, site)), lambda: None)
        at.base(input_ids=_ids(at, tokens), use_cache=False)
    return {key: value.cpu() for key, value in values.items()}


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


def _head(at: Locator, values: Values) -> dict[str, str]:
    last = len(at.layers) - 1
    normed, logits = values.get((last, "final_norm")), values.get((last, "logits"))
    if normed is None or logits is None:
        return {}
    with torch.no_grad():
        again = logits_of(at, normed.to(next(at.base.parameters()).device)).cpu()
    if again.shape == logits.shape and _close(again, logits):
        return {}
    return {"final_norm": "through the head it does not give the logits"}
