"""What a router module returns, and whether it can be read: shown on the module itself by one tiny forward.

A router is readable where it returns its logits, experts and weights, where the logits are what its first linear map
gives, and where that map giving those logits again makes it pick the same experts. Else its site is refused by name.
"""

from __future__ import annotations

import re
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .attach import FirstLinear
from .sites import Locator, Place

_SPARSE = re.compile(r"(?i)experts?$|router|moe$|sparsemoe|moe\w*block")
_EXTRAS: WeakKeyDictionary[nn.Module, tuple[tuple[str | int, str], ...]] = WeakKeyDictionary()
"""Router -> (name or number of a further argument, path of its tensor in the layer)."""


def looks_sparse(at: Locator) -> bool:
    """Some part of a layer is called a router or experts."""
    names = ((path.rpartition(".")[2], type(m).__name__) for layer in at.layers for path, m in layer.named_modules())
    return any(path and (_SPARSE.search(path) or _SPARSE.search(kind)) for path, kind in names)


def why_unread(at: Locator) -> str | None:
    """Why no router of this model can be read; None if it has one that can, or looks dense."""
    if at.layers_with("router"):
        return None
    reason = at.refused.get("router") or at.family.lacks.get("router")
    if reason is None and looks_sparse(at):
        reason = "its layers have experts, but it does not declare a router that returns its own picks"
    return reason


def read_output(output: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(logits, experts, weights) from what a router returns, whatever the order of the last two."""
    if isinstance(output, tuple) and len(output) >= 3 and all(isinstance(part, Tensor) for part in output):
        experts = next((part for part in output[1:] if not part.is_floating_point()), None)
        weights = next((part for part in output[1:] if part.is_floating_point()), None)
        if experts is not None and weights is not None:
            return output[0], experts, weights if weights.shape == experts.shape else weights.gather(-1, experts)
    raise ValueError("this router does not return its logits, weights and experts, so its picks cannot be read")


def forward_plainly(place: Place, hidden: Tensor) -> Any:
    """The router's own forward without hooks that are in force, with the further arguments that its block gives it."""
    extras = {name: _tensor(place.owner, path) for name, path in _EXTRAS.get(place.module, ())}
    further = [extras[n] for n in sorted(n for n in extras if isinstance(n, int))]
    named = {str(name): value for name, value in extras.items() if isinstance(name, str)}
    return type(place.module).forward(place.module, hidden, *further, **named)


def replay(place: Place, logits: Tensor) -> tuple[Tensor, Tensor]:
    """(experts [S, K], weights [S, K]) that a router picks when its linear map gives `logits` [S, E]."""
    hidden = _zeros(place, len(logits))
    logits = logits.to(hidden.device)
    with torch.no_grad(), FirstLinear(lambda value, source: logits.to(value.dtype)):
        _, experts, weights = read_output(forward_plainly(place, hidden))
    return experts, weights


class _Names(TorchFunctionMode):
    """Names of the torch functions that run."""

    def __init__(self):
        super().__init__()
        self.seen: set[str] = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.add(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


def score_function(place: Place) -> str:
    """How a router turns logits into scores: "softmax" or "sigmoid"."""
    with torch.no_grad(), _Names() as names:
        forward_plainly(place, _zeros(place, 1))
    return "sigmoid" if "sigmoid" in names.seen else "softmax"


def _zeros(place: Place, rows: int) -> Tensor:
    parameter = next(p for p in place.module.parameters() if p.dim() == 2)
    return torch.zeros(rows, parameter.shape[-1], dtype=parameter.dtype, device=parameter.device)


def _tensor(owner: nn.Module, path: str) -> Tensor:
    found: Any = owner
    for name in path.split("."):
        found = getattr(found, name)
    return found


def check_routers(at: Locator, ids: Tensor) -> dict[str, str]:
    """{"router": reason} if some layer's router cannot be read, else {}. Costs one forward over `ids` [B, T]."""
    places = [place for layer in at.layers_with("router") if (place := at.place("router", layer)) is not None]
    calls: dict[int, tuple] = {}

    def keep(layer: int):
        def hook(module, args, kwargs, output):
            calls[layer] = (args, kwargs, output)

        return hook

    handles = [p.module.register_forward_hook(keep(p.layer), with_kwargs=True) for p in places]
    try:
        with torch.no_grad():
            at.base(input_ids=ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    for place in places:
        try:
            if place.layer not in calls:
                raise ValueError("a forward does not reach it")
            _check(place, *calls[place.layer])
        except Exception as error:
            kind = type(place.module).__name__
            return {"router": f"at layer {place.layer} it cannot be read from what {kind} returns: {error}"}
    return {}


def _check(place: Place, args: tuple, kwargs: dict, output: Any) -> None:
    """ValueError unless what the router returned can be read, and made again from its logits alone."""
    logits, experts, _ = read_output(output)
    given = [(n - 1, value) for n, value in enumerate(args) if n] + list(kwargs.items())
    if not args:
        given = [(name, value) for name, value in given if name != "hidden_states"]
    known = {id(t): path for path, t in (*place.owner.named_parameters(), *place.owner.named_buffers())}
    missing = [name for name, value in given if id(value) not in known and value is not None]
    if missing:
        raise ValueError(f"it is given more than hidden states, {missing}, which its logits do not say")
    _EXTRAS[place.module] = tuple((name, known[id(value)]) for name, value in given if value is not None)
    hidden = args[0] if args else kwargs["hidden_states"]
    seen: list[Tensor] = []

    def look(value: Tensor, source) -> None:
        seen.append(value.clone())

    with torch.no_grad(), FirstLinear(look):
        forward_plainly(place, hidden)
    if not seen or seen[0].numel() != logits.numel():
        raise ValueError("the logits it returns are not what its first linear map gives")
    if not torch.allclose(seen[0].reshape(logits.shape).to(logits.dtype), logits, rtol=1e-3, atol=1e-4):
        raise ValueError("the logits it returns are not what its first linear map gives")
    again, _ = replay(place, logits.reshape(-1, logits.shape[-1]))
    if not torch.equal(again.reshape(-1).sort().values, experts.reshape(-1).sort().values):
        raise ValueError("its picks do not follow from its logits alone")
