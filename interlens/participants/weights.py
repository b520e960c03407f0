"""Where a participant's model comes from: loaded when first asked for, shared by clones, left behind when pickled."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..adapters import attached
from ..engine.shared import engine_for


class Weights:
    """Where a model comes from, loaded when first asked for. Shared by clones; pickles without the model."""

    def __init__(
        self, source: Any = None, *, model: Any = None, tokenizer: Any = None, engine: Any = None, **options: Any
    ):
        self.source = source if isinstance(source, str) or source is None else str(source)
        self.options = options
        self._model, self._tokenizer, self._engine = model, tokenizer, engine
        if model is not None and self.source is None:
            if tokenizer is None and engine is None:  # a model object from `load` knows its tokenizer
                from ..loading import load

                self._tokenizer = load(model).tokenizer
            self.source = getattr(getattr(model, "config", None), "_name_or_path", None) or None
        self._given = model is not None
        self._loaded: dict[str | None, Any] = {}

    def get(self, adapter: str | None = None) -> Any:
        """The `loading.Loaded` of this source, with the adapter attached."""
        if adapter not in self._loaded:
            if self._engine is not None and self._model is None:
                return _Stub(None, self._tokenizer, adapter)
            if self._given and self._model is None:
                raise ValueError(
                    f"this participant was made from a loaded model ({self.source or 'unnamed'}), which does not "
                    "travel; give it one again with participant.weights = Weights(model=..., tokenizer=...)"
                )
            from ..loading import load

            source: Any = self._model if self._model is not None else self.source
            if adapter is not None and adapter in attached(self.get().model):  # the name of one that is there already
                self._loaded[adapter] = replace(self.get(), adapter=adapter)
            else:
                self._loaded[adapter] = load(source, tokenizer=self._tokenizer, adapter=adapter, **self.options)
        return self._loaded[adapter]

    @property
    def is_loaded(self) -> bool:
        """Its model can be had without loading anything; so is one that only a given engine knows."""
        return bool(self._loaded) or self._model is not None or self._engine is not None

    def engine(self, adapter: str | None = None) -> Any:
        """The engine of the model, shared by everybody who uses it; or the one that was given."""
        if self._engine is not None:
            return self._engine
        return engine_for(self.get(adapter).model)

    def __deepcopy__(self, memo: dict) -> Weights:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_model": None, "_tokenizer": None, "_engine": None, "_loaded": {}}


@dataclass(frozen=True)
class _Stub:
    """A tokenizer whose model lives behind an engine that was given."""

    model: Any
    tokenizer: Any
    adapter: str | None
