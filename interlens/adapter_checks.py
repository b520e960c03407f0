"""What attaching an adapter must leave and bring: the base as it was, and each tensor of the file in its place."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def base_of(model: nn.Module) -> dict[str, tuple]:
    """Every module, parameter and buffer of the base, under its name without PEFT's parts; of tensors a sum of bits.

    The sum weighs each row of a tensor by its place.
    """
    found: dict[str, tuple] = {}
    for key, module in model.named_modules(remove_duplicate=False):
        inner = getattr(module, "base_layer", module)
        if ".lora_" not in key:
            found[f"module {_plain(key)}"] = (type(inner).__name__,)
    named = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    seen: dict[int, int] = {}
    for key, tensor in (pair for pairs in named for pair in pairs):
        if ".lora_" not in key:
            if id(tensor) not in seen:
                seen[id(tensor)] = _sum(tensor.detach())
            found[_plain(key)] = (tuple(tensor.shape), tensor.dtype, seen[id(tensor)])
    return found


def _plain(key: str) -> str:
    return key.replace(".base_layer.", ".").removesuffix(".base_layer")


def _sum(tensor: Tensor) -> int:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    bits = tensor.contiguous().view(_BITS[tensor.element_size()])
    rows = bits.sum(-1, dtype=torch.int64).flatten() if bits.dim() > 1 else bits.flatten().long()
    return int((rows * torch.arange(1, rows.numel() + 1, device=rows.device)).sum())


def fitting(model: nn.Module, path: str) -> dict[str, Tensor]:
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
        if not value.is_floating_point() or not value.isfinite().all():
            raise ValueError(f"its tensor {key} holds {value.dtype} that are not all finite numbers; save it again")
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
    if side not in "AB":
        raise ValueError(f"its tensor {key} is neither of LoRA's matrices, though its configuration names plain LoRA")
    size = {"A": value.shape[-1], "B": value.shape[0]}[side]
    wanted = {"A": inputs, "B": outputs}[side]
    if size != wanted:
        raise ValueError(
            f"its tensor {key} has shape {tuple(value.shape)}, made for {size}; this base has {wanted} there"
        )


def check_arrived(model: nn.Module, name: str, weights: Mapping[str, Tensor]) -> None:
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
