"""LoRA adapters on shared base weights: attached once, off until a row asks for one.

Invariant: a model with attached adapters and no row asking for any computes what it computed before, and no hook of
this module exists outside `per_row`. Works on transformers models and on PEFT's wrapper alike.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from .errors import CannotLoad, UnsupportedIntervention
from .preview import require_adapter

_BASE = "__base__"  # what PEFT calls "no adapter" in a mixed batch


def attach(model: nn.Module, folder: str | os.PathLike) -> str:
    """Attach the PEFT adapter in `folder` to `model`, inactive, and give the name it has there. Twice is once.

    Raises CannotLoad for a folder that is no adapter, for another base's adapter, and for kinds that cannot differ per
    row of a batch (only plain LoRA can: not DoRA, not saved whole modules).
    """
    folder = os.fspath(folder)
    require_adapter(folder)
    path = os.path.realpath(os.path.expanduser(folder))
    name = f"{Path(path).name}-{hashlib.blake2b(path.encode(), digest_size=4).hexdigest()}".replace(".", "_")
    if name in attached(model):
        return name
    before, trainable = in_force(model), {id(p) for p in model.parameters() if p.requires_grad}
    try:
        _inject(model, path, name)
    except Exception as error:
        raise CannotLoad(f"cannot attach adapter {folder!r} to {type(model).__name__}: {error}") from error
    finally:
        _set_active(model, before)
        for parameter in model.parameters():
            parameter.requires_grad_(id(parameter) in trainable)
        model.eval()
    return name


def _inject(model: nn.Module, path: str, name: str) -> None:
    """By PEFT alone, whatever PEFT transformers asks for; then every tensor of the file is looked for in the model."""
    from peft import PeftConfig, PeftModel, inject_adapter_in_model, set_peft_model_state_dict
    from peft.utils import load_peft_weights

    weights = load_peft_weights(path, device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of adapters attached before
        if isinstance(model, PeftModel):
            model.load_adapter(path, adapter_name=name)
        else:
            config = PeftConfig.from_pretrained(path)
            inject_adapter_in_model(config, model, adapter_name=name)
            bare = {key.removeprefix("base_model.model."): value for key, value in weights.items()}
            set_peft_model_state_dict(model, bare, adapter_name=name)
    marker = f".{name}.weight"
    stored = {key.replace(marker, ".weight"): p for key, p in model.named_parameters() if marker in key}
    if len(stored) != len(weights):
        raise ValueError(f"it holds {len(weights)} tensors, and this model has places for {len(stored)}")
    for key, value in weights.items():
        place = next((p for known, p in stored.items() if key.endswith(known) or known.endswith(key)), None)
        if place is None or not torch.equal(place.detach().cpu(), value.to(place.dtype)):
            raise ValueError(f"its tensor {key} did not arrive in the model")


def attached(model: nn.Module) -> tuple[str, ...]:
    """Names of the adapters attached to a model."""
    return tuple(getattr(model, "peft_config", {}))


@contextmanager
def per_row(model: nn.Module, names: Sequence[str | None]) -> Generator[None]:
    """Inside, row i of every forward runs under adapter `names[i]`; None is the base weights alone.

    Raises UnsupportedIntervention for a name that is not attached. Hooks are removed whatever happens inside.
    """
    if unknown := sorted({name for name in names if name} - set(attached(model))):
        has = ", ".join(attached(model)) or "none"
        raise UnsupportedIntervention(f"no adapter {', '.join(unknown)} on this {type(model).__name__}; it has: {has}")
    if not any(names) and not in_force(model):
        yield
        return
    from peft.tuners.lora import LoraLayer

    wanted = [name or _BASE for name in names]

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


def _set_active(model: nn.Module, names: list[str]) -> None:
    from peft.tuners.tuners_utils import BaseTunerLayer

    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            module.set_adapter(names, inference_mode=True)


def in_force(model: nn.Module) -> list[str]:
    """Adapters that a plain call of the model runs under."""
    if not attached(model):
        return []
    from peft.tuners.tuners_utils import BaseTunerLayer

    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            return [] if module.disable_adapters else list(module.active_adapters)
    return []
