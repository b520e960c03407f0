"""The one engine of a loaded model, shared by everybody who uses that model."""

from __future__ import annotations

import threading
from typing import Any

from torch import nn

from .engine import Engine

_MAKING = threading.Lock()


def engine_for(model: nn.Module, **settings: Any) -> Engine:
    """The one engine of a model object; `settings` are those of `Engine`, given when it is first asked for."""
    with _MAKING:
        engine = model.__dict__.get("_interlens_engine")
        if engine is None:
            engine = model.__dict__["_interlens_engine"] = Engine(model, **settings)
        elif settings:
            raise ValueError(f"this model has an engine already; settings {sorted(settings)} would be ignored")
        return engine
