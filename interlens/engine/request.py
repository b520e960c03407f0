"""What goes into an engine and what comes out: tokens in, tokens out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..interp.select import Layout

if TYPE_CHECKING:
    from ..interp.activation_cache import ActivationRecord, CaptureSpec
    from ..interp.intervention import Intervention


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn. Nothing else applies: a model's `generation_config` is never consulted."""

    temperature: float = 0.8
    """0 is argmax."""
    top_p: float | None = 0.95
    top_k: int | None = None
    max_new_tokens: int = 512
    stop_ids: tuple[int, ...] = ()
    """A drawn stop id ends the reply and is part of it."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One generation. `key` alone decides its noise: (seed, conversation key, message, call), any JSON values."""

    tokens: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    key: tuple = ()
    adapter: str | None = None
    interventions: tuple[Intervention, ...] = ()
    capture: tuple[CaptureSpec, ...] = ()
    logprobs: bool = False
    keep: str | None = None
    """Name of the participant whose KV is parked afterwards; None parks nothing."""
    layout: Layout = field(default_factory=Layout)
    forced: tuple[int, ...] | None = None
    """Teacher forcing: these tokens are fed as if they had been drawn; nothing is sampled."""


@dataclass(kw_only=True)
class Reply:
    """The outcome of one request. On error, `error` is set and the rest describes how far it came."""

    tokens: tuple[int, ...] = ()
    """Generated ids, the stop token included."""
    finish_reason: str = "stop"
    """"stop", "length" or "error"."""
    sampling: Sampling = field(default_factory=Sampling)
    """The settings in force; nothing else applied."""
    phases: tuple[str, ...] = ()
    """Phase of each generated token."""
    logprobs: Mapping[str, list[float]] | None = None
    """From raw logits, in nats: logprobs, surprisal, entropy; and sampling_logprobs. Lists of len(tokens)."""
    records: list[ActivationRecord] = field(default_factory=list)
    """Without an address: `participant` is "" and `message_idx` -1 until the conversation fills them in."""
    tokens_modified: tuple[int, ...] = ()
    """Per intervention of the request: positions whose state carries its edit."""
    counters: dict[str, Any] = field(default_factory=dict)
    error: BaseException | None = None
