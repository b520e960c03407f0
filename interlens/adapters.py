"""LoRA adapters on shared base weights: attached once, off until a row asks for one.

Invariant: a model with attached adapters and no row asking for any computes what it computed before, and outside
`per_row` no hook of this module exists.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from .errors import CannotLoad, UnsupportedIntervention
from .sources import adapter_config

_BASE = "__base__"  # what PEFT calls "no adapter" in a mixed batch


def attach(model: nn.Module, folder: str | os.PathLike) -> str:
    """Attach the PEFT adapter in `folder` to `model`, inactive, and give the name it has there. Twice is once.

    Raises CannotLoad for a folder that is no adapter, for another base's adapter, and for kinds that cannot differ per
    row of a batch (only plain LoRA can: not DoRA, not saved whole modules).
    """
    folder = os.fspath(folder)
    config = adapter_config(folder)
    unfit = [f"peft_type {config.get('peft_type')}"] if config.get("peft_type") != "LORA" else []
    unfit += [key for key in ("use_dora", "modules_to_save", "trainable_token_indices") if config.get(key)]
    if unfit:
        raise CannotLoad(
            f"adapter {folder!r} has {', '.join(unfit)}; only plain LoRA can be shared by rows of a batch: "
            "merge it into its base (PEFT's merge_and_unload) and load the merged folder"
        )
    from peft.tuners.tuners_utils import BaseTunerLayer

    path = os.path.realpath(os.path.expanduser(folder))
    name = f"{Path(path).name}-{hashlib.blake2b(path.encode(), digest_size=4).hexdigest()}".replace(".", "_")
    if name in getattr(model, "peft_config", {}):
        return name
    target: Any = model
    before, trainable = _active(model), {id(p) for p in model.parameters() if p.requires_grad}
    try:
        target.load_adapter(path, adapter_name=name)
    except Exception as error:
        raise CannotLoad(f"cannot attach adapter {folder!r} to {type(model).__name__}: {error}") from error
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            module.set_adapter(before, inference_mode=True)
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in trainable)
    model.eval()
    return name


def attached(model: nn.Module) -> tuple[str, ...]:
    """Names of the adapters attached to a model."""
    return tuple(getattr(model, "peft_config", {}))


@contextmanager
def per_row(model: nn.Module, names: Sequence[str | None]) -> Generator[None]:
    """Inside, row i of every forward runs under adapter `names[i]`; None is the model as it is without being asked."""
    if not any(names):
        yield
        return
    if unknown := sorted({name for name in names if name} - set(attached(model))):
        has = ", ".join(attached(model)) or "none"
        raise UnsupportedIntervention(f"no adapter {', '.join(unknown)} on this {type(model).__name__}; it has: {has}")
    from peft.tuners.lora import LoraLayer

    active = _active(model)
    if len(active) > 1:
        raise UnsupportedIntervention(f"adapters {', '.join(active)} are active at once; only one or none can be")
    wanted = [name or (active[0] if active else _BASE) for name in names]

    def choose(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return args, {**kwargs, "adapter_names": wanted}

    handles = []
    try:
        for module in model.modules():
            if isinstance(module, LoraLayer):
                handles.append(module.register_forward_pre_hook(choose, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _active(model: nn.Module) -> list[str]:
    """Adapters in force when nobody asks."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            return [] if module.disable_adapters else list(module.active_adapters)
    return []
