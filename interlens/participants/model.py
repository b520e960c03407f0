"""Local models as participants."""

from __future__ import annotations

from typing import Any

from .base import Participant


class ModelParticipant(Participant):
    """A local model. Build with `AutoModelParticipant.from_pretrained` (lazy) or `.from_model`; pickles without weights.

    `engine` is the engine of its model (loading it on first use). Settings are plain attributes and may be changed.
    """

    capturable = True

    def __init__(
        self, name: str, *, temperature: float = 0.8, top_p: float | None = 0.95, top_k: int | None = None,
        max_new_tokens: int = 512, seed: int | None = None, thinking: Any = "auto", tools: tuple = (),
        max_tool_iters: int = 4, steering: Any = None, adapter: str | None = None, system_prompt: Any = None,
        private_context: tuple = (), source: Any = None, model: Any = None, tokenizer: Any = None, engine: Any = None,
    ):  # fmt: skip
        super().__init__(name, system_prompt=system_prompt, private_context=private_context, seed=seed)
        raise NotImplementedError


class AutoModelParticipant:
    """Makes ModelParticipants."""

    @staticmethod
    def from_pretrained(id_or_path: str, *, name: str, **options: Any) -> ModelParticipant:
        """A participant whose model is loaded when first needed; equal ids load once per process."""
        raise NotImplementedError

    @staticmethod
    def from_model(model: Any, tokenizer: Any, *, name: str, **options: Any) -> ModelParticipant:
        """A participant on a model that is already loaded."""
        raise NotImplementedError
