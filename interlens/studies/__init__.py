"""Studies: experiments made of many runs of one model. Names load lazily."""

import importlib

_HOMES = {"causal_trace": "causal_trace", "LensTable": "lens_table", "lens_table": "lens_table"}
__all__ = sorted(_HOMES)


def __getattr__(name: str):
    if name in _HOMES:
        value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
        globals()[name] = value  # over the submodule of the same name
        return value
    raise AttributeError(f"module 'interlens.studies' has no attribute {name!r}")


def __dir__():
    return __all__
