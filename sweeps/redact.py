"""Secrets stay out of what is written: errors, tracebacks, events and what is printed."""

from __future__ import annotations

import os
import re

_SECRET = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS)$", re.IGNORECASE)

_LOOKS_SO = re.compile(
    r"\b(sk-[A-Za-z0-9_-]{16,}|hf_[A-Za-z0-9]{16,}|AKIA[0-9A-Z]{16})\b|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"
)

MIN_CHARS = 8
"""A shorter value would be found in ordinary words."""


def redact(text: str) -> str:
    """`text` without the values of environment variables named like secrets, and without what looks like a key."""
    for name, value in os.environ.items():
        if len(value) >= MIN_CHARS and _SECRET.search(name) and value in text:
            text = text.replace(value, f"<{name}>")
    return _LOOKS_SO.sub("<secret>", text)
