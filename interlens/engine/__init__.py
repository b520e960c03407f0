"""Batched decoding with per-row interventions and capture. See `engine.py`."""

from .engine import Engine, engine_for
from .request import Reply, Request, Sampling
from .rows import Ticket

__all__ = ["Engine", "Reply", "Request", "Sampling", "Ticket", "engine_for"]
