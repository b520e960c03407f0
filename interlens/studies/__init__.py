"""Studies: experiments made of many runs of one model. Names load lazily."""

import importlib

_HOMES = {"causal_trace": "tracing", "LensTable": "lens", "lens_table": "lens"}
__all__ = sorted(_HOMES)


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module 'interlens.studies' has no attribute {name!r}")


def __dir__():
    return __all__
