"""One forward over some rows: the engine's only call of the model.

A `Batch` says which positions of which rows are fed. Rows of different lengths are left-padded; a pad query takes
position 0 and attends to column 0 alone, so that it stays finite, and nothing it computes is kept. Masks are ours, from
absolute positions.
"""

from __future__ import annotations

import inspect
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import DynamicCache

from ..adapters import attached, per_row, require_base
from ..errors import UnsupportedIntervention
from ..interp.attach import registered
from ..interp.sites import find_family
from .attention import COLUMNS, rows_apart
from .slabs import Slabs, Window

_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.1}
"""By how much logits of one text may differ between two ways to feed it, in units of their norm; a router may tip over."""


def _apart(logits: Tensor, others: Tensor) -> float:
    """How far logits [N, V] are from others, in units of what they say: what all tokens share says nothing."""
    a, b = (x.double() - x.double().mean(-1, keepdim=True) for x in (logits, others))
    return ((a - b).norm() / b.norm()).item()


def uses_alibi(config: Any) -> bool:
    """Positions are linear biases of attention (ALiBi): Falcon with `alibi`, MPT's attention settings, BLOOM always."""
    inner = getattr(config, "attn_config", None)
    settings = (getattr(config, "alibi", False), getattr(inner, "alibi", False))
    return any(settings) or getattr(config, "model_type", None) == "bloom"


EXACT_KINDS = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "gpt_neox", "phi3", "olmo3", "glm4")
"""Dense families (`config.model_type`) in which tests/engine/test_exact.py finds all bits of a row the same in any batch."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Positions `[starts[b], stops[b])` of the token sequences `ids[b]`, in slab rows `first + b`."""

    first: int
    ids: Sequence[Sequence[int]]
    starts: Sequence[int]
    stops: Sequence[int]
    floors: Sequence[int]
    """Columns below these hold KV already and are not written (recomputed for records only)."""
    adapters: Sequence[str | None] = ()
    all_logits: bool = False
    least: int = 1
    """A single row gets at least this many queries."""

    @property
    def num_queries(self) -> int:
        """Width T of the padded query matrix."""
        longest = max(stop - start for start, stop in zip(self.starts, self.stops, strict=True))
        return longest if len(self.ids) > 1 else max(longest, self.least)

    def flat(self, b: int, positions: np.ndarray) -> np.ndarray:
        """Index of absolute positions of row b in the flattened `[B * T]` token axis."""
        return b * self.num_queries + self.num_queries - self.stops[b] + positions


class Forward:
    """Runs batches through one model. `model` is any causal language model of transformers, PEFT-wrapped or not."""

    def __init__(self, model):
        self.model = model
        self.device = next(model.parameters()).device
        self.dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        config = getattr(model, "config", None)
        self.config: Any = config.get_text_config() if hasattr(config, "get_text_config") else config
        if uses_alibi(self.config):
            raise UnsupportedIntervention(
                f"{type(model).__name__} counts positions by ALiBi, whose biases its code makes of whole rows' masks; "
                "an engine has rows of unequal length and masks of its own. Use this model with capture_activations, or "
                "with spec.register(model) and its own generate; or take one with rotary or learned positions"
            )
        self.vocab_size = int(self.config.vocab_size)
        self.context_limit, self.why_limited = context_limit(self.config)
        self._mask_types = _mask_types(self.config)
        self.forkable = self._mask_types is not None and not getattr(model, "_is_stateful", False)
        """False for families whose state cannot be cut or copied: they get one row and a cache of transformers' own."""
        self._state = None
        self._decodes = find_family(model) is not None or not self.forkable
        """Seen to decode as it reads; families with a table are, in the tests."""
        causal = model.get_base_model() if hasattr(model, "get_base_model") else model
        parameters = inspect.signature(causal.forward).parameters
        self._keeps_logits = "logits_to_keep" in parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._takes_cache = self._cache_name in parameters or "input_ids" not in parameters
        self.least_queries = 1
        self.rows_apart = False
        """Attention is `attention.attend`, widths are multiples of 16 and no forward feeds a single token."""
        self._can_replace_attention = bool(getattr(causal, "_supports_attention_backend", False)) and self.forkable

    def keep_rows_apart(self) -> None:
        """From here on attention is ours. ValueError where nothing is known about the bits of a row."""
        kind = getattr(self.config, "model_type", "")
        shown = kind in EXACT_KINDS and getattr(self.config, "use_parallel_residual", True)
        if self.device.type != "cpu" or self.dtype != torch.bfloat16 or not (self._can_replace_attention and shown):
            raise ValueError(
                f"exact rows were asked of {type(self.model).__name__} in {self.dtype} on {self.device.type}; possible: "
                f"bfloat16 on a CPU, for the families that a test compares bit by bit ({', '.join(EXACT_KINDS)}; gpt_neox "
                "with its parallel residual). Leave out exact=True"
            )
        self.rows_apart, self.least_queries = True, 2

    def free_columns(self) -> int:
        """How many KV columns half of the free memory holds; without attention heads no column takes any."""
        if self.device.type == "cuda":
            free = torch.cuda.mem_get_info(self.device)[0]
        else:
            free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        config = self.config
        heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
        if heads is None:
            return 1 << 40
        try:
            width = getattr(config, "head_dim", None)
        except Exception:  # transformers refuses to say where layers differ
            width = max(int(v) for k, v in config.to_dict().items() if k.endswith("head_dim") and isinstance(v, int))
        width = width or config.hidden_size // config.num_attention_heads
        size = 2 * config.num_hidden_layers * heads * width * torch.empty(0, dtype=self.dtype).element_size()
        return max(4096, free // 2 // size)

    def check_registered(self) -> None:
        """UnsupportedIntervention while interventions that a user registered by hand are in force on the model."""
        if registered(self.model):
            raise UnsupportedIntervention(
                "interventions registered by hand are in force on this model; leave that block, then generate"
            )

    def check_model(self) -> None:
        """UnsupportedIntervention if the model is of a kind, or in a state, in which rows would not be what they are."""
        if not self._takes_cache:
            raise UnsupportedIntervention(
                f"{type(self.model).__name__} takes no cache of transformers ('cache' or 'past_key_values'), so it cannot "
                "be decoded step by step; use a model that does"
            )
        require_base(self.model)
        if self.model.training:
            raise UnsupportedIntervention(
                "the model is in training mode, where dropout changes logits; call model.eval()"
            )
        backend = getattr(self.config, "_attn_implementation", None)
        if self.forkable and backend not in (None, "sdpa", "eager"):
            raise UnsupportedIntervention(
                f"attention backend {backend!r} takes no masks by position; possible: sdpa, eager. "
                "Load the model with attention='sdpa'"
            )

        if not self._decodes:
            self._check_decoding()

    def _check_decoding(self) -> None:
        """UnsupportedIntervention unless rows of unequal length, fed in pieces, get the logits of a forward over each."""
        longest = min(300, self.context_limit)
        texts = [[(7 * n + 3) % self.vocab_size for n in range(size)] for size in (min(24, longest), longest)]
        slabs = Slabs()
        slabs.resize(2, longest)
        bounds = [(0, len(ids) // 2, len(ids) - 1, len(ids)) for ids in texts]
        try:
            off = 0.0
            with torch.no_grad():
                fed = [
                    self(
                        Batch(first=0, ids=texts, starts=starts, stops=stops, floors=[0, 0], adapters=(None, None)),
                        slabs,
                    )[:, -1]
                    for starts, stops in itertools.pairwise(zip(*bounds, strict=True))
                ]
                for row, ids in enumerate(texts):
                    with per_row(self.model, (None,)):
                        inputs = torch.tensor([ids], device=self.device)
                        whole = self.model(input_ids=inputs, return_dict=True).logits[0]
                    at = [stop - 1 for stop in bounds[row][1:]]
                    off = max(off, _apart(torch.stack([logits[row] for logits in fed]), whole[at]))
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise UnsupportedIntervention(
                f"{type(self.model).__name__} has no table here, and cannot be run by rows of unequal length: "
                f"{type(error).__name__}: {error}"
            ) from error
        if not off < _ROUNDING[self.dtype]:
            raise UnsupportedIntervention(
                f"{type(self.model).__name__} has no table here, and two rows fed to it in pieces get other logits than "
                f"a forward over each (off by {off:.1%}): it attends to what comes after (a decoder needs "
                "is_decoder=True in its config), or takes positions or windows from its own cache. Use another model"
            )
        self._decodes = True

    def check_adapter(self, adapter: str | None) -> None:
        """ValueError if a request cannot run under this adapter."""
        known = attached(self.model)
        if adapter is not None and self.rows_apart:
            raise ValueError(
                f"adapter {adapter!r}: rows under an adapter are not shown to be exact; leave out exact=True"
            )
        if adapter is not None and adapter not in known:
            raise ValueError(f"no adapter {adapter!r} on this model; it has: {', '.join(known) or 'none'}")

    def __call__(self, batch: Batch, slabs: Slabs) -> Float[Tensor, "row query vocab"]:
        """Logits of the last query of every row (`all_logits`: of every query). No gradients."""
        if not self.forkable:
            return self._alone(batch)
        inputs, window = self._inputs(batch)
        if self._keeps_logits and not batch.all_logits:
            inputs["logits_to_keep"] = self.least_queries if len(batch.ids) == 1 else 1
        slabs.window = window
        try:
            own = [self.config] if self.rows_apart else []
            with torch.no_grad(), per_row(self.model, batch.adapters), rows_apart(own):
                output = self.model(**inputs, **{self._cache_name: slabs}, use_cache=True, return_dict=True)
        finally:
            slabs.window = None
        return output.logits if batch.all_logits else output.logits[:, -1:]

    def _alone(self, batch: Batch) -> Tensor:
        """One row of a family with a state that is only ever continued; it begins anew at position 0."""
        ids, start, stop = batch.ids[0], batch.starts[0], batch.stops[0]
        if start == 0:
            self._state = DynamicCache(config=self.config)
        inputs = {
            "input_ids": torch.tensor([ids[start:stop]], device=self.device),
            "position_ids": torch.arange(start, stop, device=self.device)[None],
        }
        with torch.no_grad(), per_row(self.model, batch.adapters):
            output = self.model(**inputs, **{self._cache_name: self._state}, use_cache=True, return_dict=True)
        return output.logits if batch.all_logits else output.logits[:, -1:]

    def _inputs(self, batch: Batch) -> tuple[dict, Window]:
        num_rows, queries = len(batch.ids), batch.num_queries
        ids = np.zeros((num_rows, queries), dtype=np.int64)
        positions = np.zeros((num_rows, queries), dtype=np.int64)
        real = np.zeros((num_rows, queries), dtype=bool)
        for b, (start, stop) in enumerate(zip(batch.starts, batch.stops, strict=True)):
            pad = queries - (stop - start)
            ids[b, pad:] = batch.ids[b][start:stop]
            positions[b, pad:] = np.arange(start, stop)
            real[b, pad:] = True
        fresh = real & (positions >= np.asarray(batch.floors)[:, None])
        row, query = fresh.nonzero()
        device = self.device
        window = Window(
            first=batch.first,
            num_rows=num_rows,
            width=-(-max(batch.stops) // COLUMNS) * COLUMNS if self.rows_apart else max(batch.stops),
            row=torch.from_numpy(row).to(device),
            query=torch.from_numpy(query).to(device),
            column=torch.from_numpy(positions[row, query]).to(device),
        )
        at = torch.from_numpy(positions).to(device)
        inputs = {
            "input_ids": torch.from_numpy(ids).to(device),
            "position_ids": at,
            "attention_mask": self._masks(at, window.width),
        }
        return inputs, window

    def _masks(self, positions: Tensor, width: int) -> Tensor | dict[str, Tensor]:
        """Additive masks `[B, 1, T, width]` from absolute positions; a dict where layers differ in kind."""
        columns = torch.arange(width, device=self.device)
        visible = columns <= positions[..., None]
        masks = {}
        for kind, size in (self._mask_types or {}).items():
            seen = visible if size is None else visible & (columns > positions[..., None] - size)
            mask = torch.zeros(seen.shape, dtype=self.dtype, device=self.device)
            masks[kind] = mask.masked_fill_(~seen, torch.finfo(self.dtype).min)[:, None]
        return masks if len(masks) > 1 else next(iter(masks.values()))


def is_out_of_memory(error: BaseException) -> bool:
    """A device or host allocation failed."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    signs = ("DefaultCPUAllocator", "out of memory", "ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


UNLIMITED = 1 << 30


def context_limit(config) -> tuple[int, str]:
    """How many positions a row may have, and why not more where that is not plain.

    Rotary scalings that look at the longest row of a batch would make rows depend on each other beyond the length that
    the model was first trained on.
    """
    limit = int(getattr(config, "max_position_embeddings", None) or 0)
    limit, why = limit if limit > 0 else UNLIMITED, ""
    given = getattr(config, "rope_parameters", None) or {}
    for rope in (given, *given.values()):
        kind = rope.get("rope_type") if isinstance(rope, dict) else None
        if kind in ("longrope", "dynamic"):
            first = rope.get("original_max_position_embeddings")
            first = first or getattr(config, "original_max_position_embeddings", None) or limit
            limit, why = (
                min(limit, int(first)),
                f" (beyond them its {kind} scaling would look at the batch's longest row)",
            )
    return limit, why


def _mask_types(config) -> dict[str, int | None] | None:
    """Attention kind -> sliding window size (None: full), by what the configuration declares.

    None if some layers are of another kind (linear attention, SSM, chunked attention).
    """
    kinds = sorted(set(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()))
    sliding = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        sliding = None
    known = {"full_attention": None, "sliding_attention": sliding}
    if not set(kinds) <= set(known):
        return None
    if len(kinds) == 1:
        return {kinds[0]: known[kinds[0]]}
    return {kind: known[kind] for kind in kinds} if kinds else {"full_attention": sliding}
