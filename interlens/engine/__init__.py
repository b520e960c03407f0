"""Batched decoding with per-row interventions and capture. See `engine.py`."""
