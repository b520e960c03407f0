"""LoRA adapters on shared base weights: attached once, off until a row asks for one.

Invariant: a model with attached adapters and no row asking for any computes what it computed before, and no hook of
this module exists outside `per_row`. Works on transformers models and on PEFT's wrapper alike.
"""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from .errors import CannotLoad, UnsupportedIntervention
from .preview import require_adapter

_BASE = "__base__"  # what PEFT calls "no adapter" in a mixed batch


def attach(model: nn.Module, folder: str | os.PathLike) -> str:
    """Attach the PEFT adapter in `folder` to `model`, inactive, and give the name it has there. Twice is once.

    Raises CannotLoad, with the model as it was, for a folder that is no adapter, for an adapter of another base, and for
    what cannot differ per row of a batch (`interlens.adapter_config` says which, and why).
    """
    folder = os.fspath(folder)
    config = require_adapter(folder)
    path = os.path.realpath(os.path.expanduser(folder))
    name = f"{Path(path).name}-{hashlib.blake2b(path.encode(), digest_size=4).hexdigest()}".replace(".", "_")
    if name in attached(model):
        return name
    before, trainable = in_force(model), {id(p) for p in model.parameters() if p.requires_grad}
    undo, base = _undo(model, name), _base(model)
    try:
        weights = _fitting(model, path, config)
        _inject(model, path, name, weights)
        _check_arrived(model, name, weights)
        if changed := [key for key, found in _base(model).items() if base.get(key) != found]:
            raise ValueError(f"attaching it changed the base itself at {', '.join(changed[:3])}")
    except Exception as error:
        undo()
        raise CannotLoad(f"cannot attach adapter {folder!r} to {type(model).__name__}: {error}") from error
    finally:
        _set_active(model, before)
        for parameter in model.parameters():
            parameter.requires_grad_(id(parameter) in trainable)
        model.eval()
    return name


def _base(model: nn.Module) -> dict[str, tuple]:
    """What every parameter and buffer of the base holds, as a sum of its bits, under its name without PEFT's parts."""
    found = {}
    for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if ".lora_" not in key:
            bits = (
                tensor.detach()
                .contiguous()
                .view(torch.uint8 if tensor.element_size() == 1 else _BITS[tensor.element_size()])
            )
            plain = key.replace(".base_layer.", ".")
            found[plain] = (tuple(tensor.shape), tensor.dtype, int(bits.sum(dtype=torch.int64)))
    return found


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def _undo(model: nn.Module, name: str) -> Callable[[], None]:
    """What takes an adapter of this name away again, with every module that was put in for it."""
    children = [(parent, key, child) for parent in model.modules() for key, child in parent._modules.items()]
    configured = hasattr(model, "peft_config")

    def undo() -> None:
        from peft.tuners.tuners_utils import BaseTunerLayer

        for parent, key, child in children:
            parent._modules[key] = child
        for module in model.modules():
            if isinstance(module, BaseTunerLayer):
                module.delete_adapter(name)
        if configured:
            cast(Any, model).peft_config.pop(name, None)
        elif hasattr(model, "peft_config"):
            del model.peft_config

    return undo


def _fitting(model: nn.Module, path: str, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The adapter's tensors by place. ValueError where the model has no such place, or one of another shape.

    A copy of the base's own embedding, which PEFT saves along, is left out; one that was trained is refused.
    """
    from peft.utils import load_peft_weights

    found, modules = {}, dict(model.named_modules())
    for key, value in load_peft_weights(path, device="cpu").items():
        bare = key.removeprefix("base_model.model.")
        where, kind, _ = (
            bare.rpartition(".lora_embedding_") if ".lora_embedding_" in bare else bare.rpartition(".lora_")
        )
        if not kind:
            where = bare.rpartition(".")[0].removesuffix(".base_layer")
        module = modules.get(where) or modules.get(f"base_model.model.{where}")
        base = getattr(module, "base_layer", module)
        if base is None:
            raise ValueError(f"its tensor {key} is for {where}, which this model does not have: it is for another base")
        if not kind:
            own = getattr(base, bare.rpartition(".")[2], None)
            if own is None or own.shape != value.shape or not torch.equal(own.detach().cpu(), value.to(own.dtype)):
                raise ValueError(f"it replaces {where} for every row (its tensor {key} is not the base's)")
            continue
        _check_shape(bare, value, base)
        found[key] = value
    if not found:
        raise ValueError("it holds no LoRA tensors")
    return found


def _check_shape(key: str, value: Tensor, base: nn.Module) -> None:
    """ValueError unless a LoRA tensor fits its module: a linear layer, GPT-2's Conv1D, or an embedding."""
    weight = getattr(base, "weight", None)
    if weight is None or weight.dim() != 2 or not isinstance(base, (nn.Linear, nn.Embedding, Conv1D)):
        raise ValueError(f"its tensor {key} is for a {type(base).__name__}, which cannot differ per row")
    if isinstance(base, nn.Linear):
        inputs, outputs = base.in_features, base.out_features
    else:
        inputs, outputs = weight.shape
    side = key.rpartition(".lora_")[2].removeprefix("embedding_")[0]
    size = {"A": value.shape[-1], "B": value.shape[0]}[side]
    wanted = {"A": inputs, "B": outputs}[side]
    if size != wanted:
        raise ValueError(
            f"its tensor {key} has shape {tuple(value.shape)}, made for {size}; this base has {wanted} there"
        )


def _inject(model: nn.Module, path: str, name: str, weights: Mapping[str, Tensor]) -> None:
    """By PEFT alone, whatever PEFT transformers asks for."""
    from peft import PeftConfig, PeftModel, inject_adapter_in_model, set_peft_model_state_dict

    config: Any = PeftConfig.from_pretrained(path)
    config.init_lora_weights, config.inference_mode = True, True  # the file's weights replace what it draws
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of adapters attached before
        if isinstance(model, PeftModel):
            model.add_adapter(name, config)
            set_peft_model_state_dict(model, dict(weights), adapter_name=name)
        else:
            inject_adapter_in_model(config, model, adapter_name=name)
            bare = {key.removeprefix("base_model.model."): value for key, value in weights.items()}
            set_peft_model_state_dict(model, bare, adapter_name=name)


def _check_arrived(model: nn.Module, name: str, weights: Mapping[str, Tensor]) -> None:
    """ValueError unless the adapter's parameters in the model are the file's, each of them and no other."""
    part = re.compile(rf"\.{re.escape(name)}(?=\.|$)")
    stored = {part.sub("", key): p for key, p in model.named_parameters() if ".lora_" in key and part.search(key)}
    stored = {key.removeprefix("base_model.model."): p for key, p in stored.items()}
    wanted = {key.removeprefix("base_model.model."): value for key, value in weights.items()}
    if stored.keys() != wanted.keys():
        odd = sorted(stored.keys() ^ wanted.keys())
        raise ValueError(
            f"it holds {len(wanted)} tensors, and this model has places for {len(stored)}; not in both: {', '.join(odd[:3])}"
        )
    for key, value in wanted.items():
        if not torch.equal(stored[key].detach().cpu(), value.to(stored[key].dtype)):
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
