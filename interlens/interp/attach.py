"""Where torch hooks are put on a module and taken off again: what `hooks` and `contracts` attach with.

Knows places (`sites.Place`), not models: which places a model has is for `locate`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .sites import Place, unwrap

Tap = Callable[[Tensor], Tensor | None]
_REGISTERED: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
_LOCKS: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
_MAKING = threading.Lock()


def lock_of(model: nn.Module):
    """The lock of a model (of its base, under wrappers): reentrant, held by engines' steps and `attached` blocks."""
    with _MAKING:
        return _LOCKS.setdefault(unwrap(model), threading.RLock())


def registered(model: nn.Module) -> bool:
    """True while interventions that a user registered by hand are in force on this model."""
    return _REGISTERED.get(unwrap(model), 0) > 0


def mark_registered(model: nn.Module, change: int) -> None:
    """Count an intervention that a user registers (+1) or removes (-1)."""
    base = unwrap(model)
    _REGISTERED[base] = _REGISTERED.get(base, 0) + change


class Attachments:
    """The hooks of one block, and the (B, T) of the forward in progress for sites that the model flattens."""

    def __init__(self):
        self.undo: list[Callable[[], None]] = []
        self.shapes: dict[nn.Module, tuple[int, ...]] = {}

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.remove()

    def remove(self) -> None:
        """Take every hook off again, the last one first."""
        while self.undo:
            self.undo.pop()()

    def add(self, place: Place, tap: Tap, note: Callable[[], None]) -> None:
        """Let `tap` see and replace what stands at `place`; `note` is called whenever it is reached."""
        if place.owner not in self.shapes and place.site in (
            "router",
            "expert_mix",
            "shared_expert",
            "mlp",
            "resid_mid",
        ):
            self.shapes[place.owner] = torch.Size()
            handle = place.owner.register_forward_pre_hook(self._remember, with_kwargs=True)
            self.undo.append(handle.remove)

        def visit(value: Tensor, source: Tensor | None) -> Tensor | None:
            note()
            return self._visit(place, tap, value, source)

        _ATTACH[("call" if place.site == "logits" else place.point.end)](place, visit, self.undo)

    def _remember(self, module, args, kwargs) -> None:
        self.shapes[module] = _hidden(args, kwargs).shape[:2]

    def _visit(self, place: Place, tap: Tap, value: Tensor, source: Tensor | None) -> Tensor | None:
        """Show the tap its site, cut out and scaled; return the module's value with the tap's replacement in it."""
        point, shown = place.point, value
        columns = None
        if point.columns is not None:
            columns = point.columns(place.owner, value.shape[-1]).to(value.device)
            shown = shown.index_select(-1, columns)
        factor = None if point.scale is None else point.scale(place.owner, source)
        if factor is not None:
            shown = shown * factor
        elif point.shared:
            shown = shown.clone()
        if shown.dim() == 2:
            shown = shown.view(*self.shapes[place.owner], shown.shape[-1])
        new = tap(shown)
        if new is None:
            return None
        if new.shape != shown.shape:
            raise ValueError(
                f"a tap at {place.site} of layer {place.layer} returned {tuple(new.shape)}, not {tuple(shown.shape)}"
            )
        new = new.to(value.dtype)
        if factor is not None:
            kept = (new == shown).reshape(value.shape)
            new = torch.where(kept, value, new.reshape(value.shape) / factor)
        if columns is not None:
            new = value.index_copy(-1, columns, new.reshape(*value.shape[:-1], len(columns)))
        new = new.reshape(value.shape)
        if point.in_place:
            value.copy_(new)
            return None
        return new


def _hidden(args, kwargs) -> Tensor:
    return kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]


def _first(output):
    return output[0] if isinstance(output, (tuple, list)) else output


def _with_first(output, new):
    return type(output)((new, *output[1:])) if isinstance(output, (tuple, list)) else new


def _attach_in(place: Place, visit, undo) -> None:
    def hook(module, args, kwargs):
        new = visit(_hidden(args, kwargs), None)
        if new is None:
            return None
        if "hidden_states" in kwargs:
            return args, {**kwargs, "hidden_states": new}
        return (new, *args[1:]), kwargs

    undo.append(place.module.register_forward_pre_hook(hook, with_kwargs=True).remove)


def _attach_out(place: Place, visit, undo) -> None:
    def hook(module, args, kwargs, output):
        source = _hidden(args, kwargs) if place.point.scale is not None else None
        new = visit(_first(output), source)
        return None if new is None else _with_first(output, new)

    undo.append(place.module.register_forward_hook(hook, with_kwargs=True).remove)


class FirstLinear(TorchFunctionMode):
    """Shows the result of the first linear map to `visit`, and goes on with what that returns."""

    def __init__(self, visit):
        super().__init__()
        self.visit, self.first = visit, True

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.nn.functional.linear and self.first:
            self.first = False
            new = self.visit(result, None)
            return result if new is None else new
        return result


def _attach_linear(place: Place, visit, undo) -> None:
    if type(place.module) is nn.Linear:
        return _attach_out(place, visit, undo)

    def around(forward, *args, **kwargs):
        with FirstLinear(visit):
            return forward(*args, **kwargs)

    _wrap_forward(place.module, around, undo)


def _attach_call(place: Place, visit, undo) -> None:
    def around(forward, *args, **kwargs):
        output = forward(*args, **kwargs)
        if isinstance(output, tuple):
            new = visit(output[0], None)
            return output if new is None else (new, *output[1:])
        new = visit(output.logits, None)
        if new is not None:
            output.logits = new
        return output

    _wrap_forward(place.module, around, undo)


@contextmanager
def replaced_forward(module: nn.Module, around: Callable) -> Iterator[None]:
    """Within the block, calling `module` calls `around(its own forward, *args, **kwargs)`."""
    undo: list[Callable[[], None]] = []
    _wrap_forward(module, around, undo)
    try:
        yield
    finally:
        undo[0]()


def _wrap_forward(module: nn.Module, around, undo) -> None:
    """Put `around` over `module.forward` (wrappers call `.forward` directly, where torch hooks would not fire)."""
    before = module.__dict__.get("forward")
    original = module.forward

    @functools.wraps(original)
    def forward(*args, **kwargs):
        return around(original, *args, **kwargs)

    def restore():
        if before is None:
            module.__dict__.pop("forward", None)
        else:
            module.__dict__["forward"] = before

    module.__dict__["forward"] = forward
    undo.append(restore)


_ATTACH = {"in": _attach_in, "out": _attach_out, "linear": _attach_linear, "call": _attach_call}
