"""The folder of a conversation.

It holds `conversation.json` and, if there are tensors, `tensors-<hash>.safetensors`. The JSON file names the tensors it
needs and is replaced last and in one go, so that a reader finds the old conversation or the new one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .encoding import SCHEMA_VERSION, Reader, Writer, dump, read, write_atomically


def save(directory: Path, state: Mapping[str, Any], needs: Mapping[str, str]) -> None:
    """Write the attributes of a conversation, and what it needs that is not saved. See `Conversation.save`."""
    directory.mkdir(parents=True, exist_ok=True)
    writer = Writer()
    encoded = {name: writer.encode(value, name) for name, value in state.items()}
    body: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "needs": dict(needs), "conversation": encoded}
    if writer.tensors:
        from safetensors.torch import save as to_bytes

        data = to_bytes(writer.tensors)
        body["tensors"] = f"tensors-{hashlib.blake2b(data, digest_size=8).hexdigest()}.safetensors"
        write_atomically(directory / body["tensors"], data)
    write_atomically(directory / "conversation.json", dump(body))
    for stale in directory.glob("tensors-*.safetensors"):
        if stale.name != body.get("tensors"):
            stale.unlink(missing_ok=True)


def load(directory: Path, allow: Iterable[str] = ()) -> dict[str, Any]:
    """The attributes of the conversation in a folder. See `Conversation.load`."""
    body = read(directory / "conversation.json")
    tensors = {}
    if body.get("tensors"):
        from safetensors.torch import load_file

        tensors = load_file(directory / Path(body["tensors"]).name)
    reader = Reader(tensors, frozenset([allow] if isinstance(allow, str) else allow))
    return {name: reader.decode(value) for name, value in body["conversation"].items()}
