"""Models and tokenizers from a name: embedded, hub id, folder, GGUF file, PEFT adapter folder, or a loaded model.

Invariants. The same (model, revision, dtype, device, attention, quantization) is loaded once per process and shared by
everybody who asks; `unload` gives it up. An adapter never copies its base: it is attached to the shared weights and
stays off until a request asks for it. Embedded models and paths never touch a network.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import adapters, sources
from .dequantise import converted
from .errors import CannotLoad
from .interp.locate import verify_once
from .sources import EMBEDDED, cache_dir
from .upcycle import upcycle

__all__ = ["EMBEDDED", "Loaded", "cache_dir", "load", "unload", "weights_hash"]

_SHARDED = ("auto", "balanced", "balanced_low_0", "sequential")
_QUANTIZED = {"4bit": "load_in_4bit", "8bit": "load_in_8bit"}
_WHAT = {"embedded": "an embedded model", "gguf": "a GGUF file", "folder": "a model folder", "hub": "a hub id"}
_loaded: dict[tuple, Loaded] = {}
_lock = threading.RLock()


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model ready to use, in eval mode, and how it was loaded. Unpacks as `model, tokenizer = load(...)`."""

    model: nn.Module
    tokenizer: Any
    name: str
    """What was asked for; for a model object, the name it was loaded from or its class."""
    kind: str
    """"embedded", "gguf", "folder", "hub" or "object"."""
    revision: str | None = None
    adapter: str | None = None
    """Name under which the adapter is attached to `model`; requests that name it run under it, others do not."""
    dtype: str = ""
    device: str = ""
    """Of the first parameter; a sharded model has a `hf_device_map` besides."""
    attention: str = ""
    """The attention backend in force: sdpa, eager, flash_attention_2, ..."""
    quantized: str | None = None
    """"4bit" or "8bit"."""

    def __iter__(self) -> Iterator[Any]:
        yield self.model
        yield self.tokenizer


def load(
    name_or_path_or_model: str | os.PathLike | nn.Module,
    *,
    tokenizer: Any = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | dict | None = None,
    attention: str | None = None,
    revision: str | None = None,
    adapter: str | os.PathLike | None = None,
    quantize: str | None = None,
    check_sites: bool = True,
) -> Loaded:
    """The model and tokenizer of a name, loaded at most once per process.

    name_or_path_or_model: an embedded name ("smollm2"), a folder, a GGUF file, a PEFT adapter folder (its base is
        loaded and the adapter attached), a hub id, or a model object (used as it is, in eval mode).
    tokenizer: overrides the model's own; needed for a model object that did not come from here or from a folder.
    dtype: "bfloat16", "float32", ... or a torch dtype; None keeps the stored one.
    device: None is the first GPU if there is one, else the CPU. "auto", "balanced" or a dict shards over devices.
    attention: "sdpa", "eager", "flash_attention_2"; None is the model's default.
    adapter: a PEFT adapter folder, attached to the shared weights and inactive until a request names it.
    check_sites: verify once, with one tiny forward, that the model's sites are what their names promise; sites that are
        not are refused from then on (`interlens.interp.contracts`).
    quantize: "4bit" or "8bit", where bitsandbytes is installed.
    Raises CannotLoad, with what was tried and the root cause.
    """
    if isinstance(name_or_path_or_model, nn.Module):
        found = _from_object(name_or_path_or_model, tokenizer)
        if check_sites:
            verify_once(found.model)
        return _with_adapter(found, adapter)
    name = os.fspath(name_or_path_or_model)
    wanted = _Wanted(
        name=name,
        kind=sources.kind(name),
        dtype=_dtype(dtype),
        device=_device(device),
        attention=attention,
        revision=revision,
        quantize=_quantize(quantize),
    )
    if wanted.kind == "adapter":
        wanted, adapter = _base_of(wanted, adapter), name
    with _lock:
        found = _once(wanted)
        if check_sites:
            verify_once(found.model)
        if tokenizer is not None:
            found = replace(found, tokenizer=tokenizer)
        return replace(_with_adapter(found, adapter), name=name)


def unload(name: str | None = None) -> None:
    """Forget the models loaded under `name`, or all; memory returns once nobody else holds them."""
    with _lock:
        for key in [k for k, loaded in _loaded.items() if name is None or loaded.name == name]:
            del _loaded[key]


def weights_hash(model: nn.Module) -> str:
    """A hash of a model's weights that a fine-tune, another dtype or another checkpoint changes.

    Reads at most 4 096 evenly spaced values of each parameter, so it is quick for sharded and large models too.
    Adapters attached later do not change it.
    """
    digest = hashlib.blake2b(digest_size=16)
    names = {
        name.replace(".base_layer.", "."): parameter
        for name, parameter in model.named_parameters()
        if ".lora_" not in name
    }
    for name in sorted(names):
        values = names[name].detach().reshape(-1)
        sample = values[:: max(1, -(-values.numel() // 4096))].contiguous().cpu()
        digest.update(f"{name} {tuple(names[name].shape)} {values.dtype}\n".encode())
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


# -- what was asked for ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    name: str
    kind: str
    dtype: torch.dtype | None
    device: str | dict
    attention: str | None
    revision: str | None
    quantize: str | None

    def key(self) -> tuple:
        """Equal for equal weights. What is the default anyway is the same as not asking for it."""
        where = self.name if self.kind in ("embedded", "hub") else os.path.realpath(os.path.expanduser(self.name))
        device = json.dumps(self.device, sort_keys=True, default=str) if isinstance(self.device, dict) else self.device
        return (where, self.dtype or self.stored_dtype(), device, self.attention, self.revision, self.quantize)

    def stored_dtype(self) -> torch.dtype | None:
        """What None means, as far as the disk tells."""
        if self.kind in ("embedded", "gguf"):
            return torch.bfloat16
        config = Path(self.name).expanduser() / "config.json"
        if self.kind != "folder" or not config.is_file():
            return None
        with suppress(ValueError):
            return getattr(torch, str(json.loads(config.read_text()).get("dtype")), None)
        return None

    def kwargs(self) -> dict[str, Any]:
        kwargs: dict[str, Any] = {"dtype": self.dtype or "auto"}
        if isinstance(self.device, dict) or self.device in _SHARDED:
            kwargs["device_map"] = self.device
        if self.attention:
            kwargs["attn_implementation"] = self.attention
        if self.quantize:
            from transformers import BitsAndBytesConfig

            options: dict[str, Any] = {_QUANTIZED[self.quantize]: True}
            kwargs["quantization_config"] = BitsAndBytesConfig(**options)
            kwargs.setdefault("device_map", {"": self.device})
        return kwargs


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise CannotLoad(
            f"no dtype {dtype!r}; possible: bfloat16, float16, float32, float64, or None for the stored one"
        )
    return found


def _device(device: str | torch.device | dict | None) -> str | dict:
    if device is None:
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    if isinstance(device, dict):
        return device
    if str(device) in _SHARDED:
        return str(device)
    try:
        parsed = torch.device(device)
    except RuntimeError as error:
        possible = f"cpu, cuda, cuda:0, {', '.join(_SHARDED)}, or a dict from module to device"
        raise CannotLoad(f"no device {device!r}; possible: {possible}") from error
    if parsed.type == "cuda" and (parsed.index or 0) >= torch.cuda.device_count():
        raise CannotLoad(f"no device {str(device)!r}: this machine has {torch.cuda.device_count()} CUDA devices")
    return f"cuda:{parsed.index or 0}" if parsed.type == "cuda" else str(parsed)


def _quantize(quantize: str | None) -> str | None:
    if quantize is not None and quantize not in _QUANTIZED:
        raise CannotLoad(f"no quantization {quantize!r}; possible: {', '.join(_QUANTIZED)}, or None")
    if quantize and importlib.util.find_spec("bitsandbytes") is None:
        raise CannotLoad(f"quantize={quantize!r} needs bitsandbytes; run: pip install bitsandbytes")
    return quantize


def _base_of(wanted: _Wanted, adapter: str | os.PathLike | None) -> _Wanted:
    """The base model that an adapter folder names."""
    if adapter is not None:
        raise CannotLoad(
            f"{wanted.name!r} is itself an adapter folder, given with adapter={os.fspath(adapter)!r}; give one"
        )
    base = sources.adapter_config(wanted.name).get("base_model_name_or_path")
    if not base:
        raise CannotLoad(f"adapter {wanted.name!r} names no base model; use load(BASE, adapter={wanted.name!r})")
    return replace(wanted, name=base, kind=sources.kind(base))


# -- loading ---------------------------------------------------------------------------------------------


def _once(wanted: _Wanted) -> Loaded:
    key = wanted.key()
    if key not in _loaded:
        found = _loaded[key] = _load(wanted)
        in_force = replace(wanted, dtype=_dtype(found.dtype), attention=found.attention or None)
        if not wanted.quantize:
            _loaded.setdefault(in_force.key(), found)
    return _loaded[key]


def _load(wanted: _Wanted) -> Loaded:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"revision": wanted.revision, "local_files_only": wanted.kind != "hub"}
    kwargs, device = wanted.kwargs(), wanted.device
    try:
        with _progress_bars(wanted.kind == "hub"):
            source = _source(wanted)
            tokenizer = AutoTokenizer.from_pretrained(source, **where)
            model: Any = _whole(AutoModelForCausalLM, source, **where, **kwargs)
            if wanted.name in sources.UPCYCLED:
                model = upcycle(model)
    except CannotLoad:
        raise
    except Exception as error:
        tried = f"cannot load {wanted.name!r} as {_WHAT[wanted.kind]}: {_root_cause(error)}"
        if wanted.kind == "folder" and not sources.has_tokenizer(wanted.name):
            tried = (
                f"cannot load {wanted.name!r}: no tokenizer in it; put it there with tokenizer.save_pretrained(folder)"
            )
        raise CannotLoad(f"{tried}; possible: {sources.possible()}" if wanted.kind == "hub" else tried) from error
    if "device_map" not in kwargs and isinstance(device, str) and device != "cpu":
        model = model.to(device)
    options = {"name": wanted.name, "kind": wanted.kind, "revision": wanted.revision, "quantized": wanted.quantize}
    return _describe(model.eval(), tokenizer, **options)


def _whole(maker: Any, source: str, **kwargs: Any) -> Any:
    """A model all of whose weights came from the checkpoint; by themselves, missing ones would be random."""
    model, about = maker.from_pretrained(source, output_loading_info=True, ignore_mismatched_sizes=True, **kwargs)
    if others := about["mismatched_keys"]:
        name, stored, wanted = sorted(others)[0]
        raise ValueError(
            f"{len(others)} of its weights have another shape than its config.json says, as {name}: "
            f"{list(stored)} stored, {list(wanted)} wanted"
        )
    if missing := sorted(about["missing_keys"]):
        shown = ", ".join(missing[:3])
        raise ValueError(f"its files lack {len(missing)} weights that its config.json asks for, as {shown}")
    return model


def _source(wanted: _Wanted) -> str:
    """What transformers is given: a folder or a hub id."""
    if wanted.kind == "embedded":
        label = sources.UPCYCLED.get(wanted.name, wanted.name)
        return str(converted(sources.embedded_file(wanted.name), label=label))
    if wanted.kind == "hub":
        return wanted.name
    path = Path(wanted.name).expanduser()
    return str(converted(path, label=path.stem) if wanted.kind == "gguf" else path)


def _describe(model: nn.Module, tokenizer: Any, **known: Any) -> Loaded:
    first = next(model.parameters())
    config = getattr(model, "config", None)
    return Loaded(
        model=model,
        tokenizer=tokenizer,
        dtype=str(getattr(model, "dtype", first.dtype)).removeprefix("torch."),
        device=str(first.device),
        attention=getattr(config, "_attn_implementation", None) or "",
        **known,
    )


def _from_object(model: nn.Module, tokenizer: Any) -> Loaded:
    with _lock:
        known = next((loaded for loaded in _loaded.values() if loaded.model is model), None)
    if known is not None:
        return known if tokenizer is None else replace(known, tokenizer=tokenizer)
    name = getattr(getattr(model, "config", None), "_name_or_path", "") or type(model).__name__
    if tokenizer is None:
        if not (Path(name) / "tokenizer_config.json").is_file():
            raise CannotLoad(f"a loaded {type(model).__name__} came without its tokenizer; pass tokenizer=...")
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=True)
    active = adapters.in_force(model)
    if len(active) > 1:
        raise CannotLoad(
            f"adapters {', '.join(active)} are active at once on this {type(model).__name__}; set one, or none"
        )
    return _describe(model.eval(), tokenizer, name=name, kind="object", adapter=active[0] if active else None)


def _with_adapter(base: Loaded, folder: str | os.PathLike | None) -> Loaded:
    if folder is None:
        return base
    with _lock:
        return replace(base, adapter=adapters.attach(base.model, folder))


@contextmanager
def _progress_bars(shown: bool) -> Generator[None]:
    """Bars are for downloads: what comes from the disk is there in a moment."""
    from transformers.utils import logging

    hide = logging.is_progress_bar_enabled() and not shown
    if hide:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if hide:
            logging.enable_progress_bar()


def _root_cause(error: BaseException) -> str:
    """The innermost error of a chain in one line, after the outer one's where that says something else."""
    inner = error
    while (deeper := inner.__cause__ or (None if inner.__suppress_context__ else inner.__context__)) is not None:
        inner = deeper
    outer, cause = (" ".join(str(e).split())[:400] or type(e).__name__ for e in (error, inner))
    return outer if inner is error or cause in outer else f"{outer} (root cause: {type(inner).__name__}: {cause})"
