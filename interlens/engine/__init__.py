"""Batched decoding with per-row interventions and capture. See `engine.py`."""

from .engine import Engine
from .request import Reply, Request, Sampling
from .rows import Ticket
from .shared import engine_for

__all__ = ["Engine", "Reply", "Request", "Sampling", "Ticket", "engine_for"]
