"""LoRA adapters on shared base weights: attached once, off until a row asks for one.

Invariant: a model with attached adapters and no row asking for any computes what it computed before, and no hook of
this module exists outside `per_row`. Works on transformers models and on PEFT's wrapper alike.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from .adapter_checks import base_of, check_arrived, fitting
from .adapter_config import MERGE, why_not
from .errors import CannotLoad, UnsupportedIntervention
from .preview import require_adapter

_BASE = "__base__"  # what PEFT calls "no adapter" in a mixed batch


def attach(model: nn.Module, folder: str | os.PathLike) -> str:
    """Attach the PEFT adapter in `folder` to `model`, inactive, and give the name it has there.

    Twice is once; a folder that was saved anew is another adapter. Two short forwards show that its rows and the base's
    can share a batch. Raises CannotLoad, with the model as it was, for a folder that is no adapter, for an adapter of
    another base, and for what cannot differ per row of a batch (`interlens.adapter_config` says which, and why).
    """
    folder = os.fspath(folder)
    require_adapter(folder)
    if reasons := _brought(model):
        raise CannotLoad(f"cannot attach adapter {folder!r}: the model came with {reasons}")
    path = os.path.realpath(os.path.expanduser(folder))
    name = _name(path)
    if name in attached(model):
        return name
    if away := next((key for key, parameter in model.named_parameters() if parameter.is_meta), None):
        raise CannotLoad(
            f"cannot attach adapter {folder!r}: {away} of the model is offloaded; load it whole on devices"
        )
    before, trainable = in_force(model), {id(p) for p in model.parameters() if p.requires_grad}
    undo, base = _undo(model, name), base_of(model)
    try:
        weights = fitting(model, path)
        _inject(model, path, name, weights)
        _settle(model, before, trainable)
        check_arrived(model, name, weights)
        now = base_of(model)
        if changed := sorted(key for key in base.keys() | now.keys() if base.get(key) != now.get(key)):
            raise ValueError(f"attaching it changed the base itself at {', '.join(changed[:3])}")
        _check_rows(model, name)
    except Exception as error:
        undo()
        said = " ".join(str(error).split()) or type(error).__name__
        raise CannotLoad(f"cannot attach adapter {folder!r} to {type(model).__name__}: {said}") from error
    finally:
        _settle(model, before, trainable)
    return name


def _settle(model: nn.Module, active: list[str], trainable: set[int]) -> None:
    """In eval mode, with these adapters in force and these parameters (by id) trainable."""
    _set_active(model, active)
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in trainable)
    model.eval()


def _name(path: str) -> str:
    """Told by where an adapter lies and what its files hold."""
    files = sorted(file for file in Path(path).iterdir() if file.name.startswith("adapter_") and file.is_file())
    digest = hashlib.blake2b(path.encode(), digest_size=4)
    for file in files:
        stat = file.stat()
        digest.update(_content(str(file), stat.st_mtime_ns, stat.st_ino, stat.st_size))
    return f"{Path(path).name}-{digest.hexdigest()}".replace(".", "_")


@functools.lru_cache(maxsize=256)
def _content(file: str, *_stat: int) -> bytes:
    """A hash of a file's bytes, read again when the file has changed."""
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").digest()


def _brought(model: nn.Module) -> str:
    """Which adapters a PEFT model came with that leave no base for other rows, and why; "" where there are none."""
    found = []
    for name, config in getattr(model, "peft_config", {}).items():
        if reasons := why_not(config.to_dict()):
            found.append(f"adapter {name!r}, which cannot differ per row of a batch: {'. '.join(reasons)}")
    return "; ".join(found)


def _check_rows(model: nn.Module, name: str) -> None:
    """ValueError unless a row under this adapter and a row under none get in one batch what each gets by itself.

    Layers that see the tokens of all rows in one list, or a choice of them, may not know whose they are.
    """
    inner: Any = cast(Any, model).get_base_model() if hasattr(model, "get_base_model") else model
    ids = torch.tensor([[3, 5, 7, 11, 6], [4, 9, 2, 8, 10]], device=inner.get_input_embeddings().weight.device)
    inputs = {"input_ids": ids}
    if "position_ids" in inspect.signature(inner.forward).parameters:  # per row, as the engine gives them
        inputs["position_ids"] = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)

    def logits(*names: str | None) -> Tensor:
        with torch.no_grad(), per_row(model, names):
            return model(**inputs, use_cache=False, return_dict=True).logits.double()

    try:
        mixed, own, base = logits(name, None), logits(name, name), logits(None, None)
    except Exception as error:
        raise ValueError(f"its rows cannot share a batch with the base's: {error}; {MERGE}") from error
    for row, alone in ((0, own), (1, base)):
        off = (mixed[row] - alone[row]).norm(dim=-1) / alone[row].norm(dim=-1)
        if not off.median() < _ROUNDING.get(next(model.parameters()).dtype, 0.2):
            whose = "a row under it" if row == 0 else "a row of the base"
            raise ValueError(f"beside other rows, {whose} gets other logits (off by {off.median():.1%}); {MERGE}")


_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3}
"""By how much the logits of most tokens may differ between two batches, in units of their norm; else 0.2."""


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


def attached(model: nn.Module) -> tuple[str, ...]:
    """Names of the adapters attached to a model."""
    return tuple(getattr(model, "peft_config", {}))


@contextmanager
def per_row(model: nn.Module, names: Sequence[str | None]) -> Generator[None]:
    """Inside, row i of every forward runs under adapter `names[i]`; None is the base weights alone.

    Raises UnsupportedIntervention for a name that is not attached, for a model that came with an adapter which leaves
    no base, and for layers that cannot know whose row they see. Hooks are removed whatever happens inside.
    """
    require_base(model)
    if unknown := sorted({name for name in names if name} - set(attached(model))):
        has = ", ".join(attached(model)) or "none"
        raise UnsupportedIntervention(f"no adapter {', '.join(unknown)} on this {type(model).__name__}; it has: {has}")
    if not any(names) and not in_force(model):
        yield
        return
    from peft.tuners.lora import LoraLayer

    wanted, tokens = [name or _BASE for name in names], [0]

    def measure(module: nn.Module, args: tuple, kwargs: dict) -> None:
        given = next((kwargs[key] for key in ("input_ids", "inputs_embeds") if kwargs.get(key) is not None), None)
        given = args[0] if given is None and args else given
        tokens[0] = given.shape[1] if isinstance(given, Tensor) and given.dim() > 1 else 0

    def choose(module: LoraLayer, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return args, {**kwargs, "adapter_names": _spread(wanted, tokens[0], args[0], module)}

    handles = []
    try:
        handles.append(model.register_forward_pre_hook(measure, with_kwargs=True))
        for module in model.modules():
            if isinstance(module, LoraLayer):
                handles.append(module.register_forward_pre_hook(choose, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _spread(names: list[str], tokens: int, value: Tensor, module: Any) -> list[str]:
    """The adapter of each entry of a layer's input: of rows, or of all tokens of all rows in one list."""
    first = value.shape[0]
    if len(set(names)) == 1:
        return names[:1] * first
    in_a_list = value.dim() == (2 if value.is_floating_point() else 1)
    if first == len(names) and not (in_a_list and tokens > 1):
        return names
    if in_a_list and first == len(names) * tokens:
        return [name for name in names for _ in range(tokens)]
    base = type(module.get_base_layer()).__name__
    raise UnsupportedIntervention(
        f"an adapter on {base} was given {tuple(value.shape)} for {len(names)} rows of {tokens} tokens, which does "
        "not tell whose row is whose; run rows of different adapters apart"
    )


def require_base(model: nn.Module) -> None:
    """UnsupportedIntervention for a PEFT model that came with an adapter which leaves no base for other rows."""
    if reasons := _brought(model):
        raise UnsupportedIntervention(f"the model came with {reasons}")


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
