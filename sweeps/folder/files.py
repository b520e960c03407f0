"""Files that are either complete or absent, and never rewritten.

Locally every write goes through `_tmp/`, is fsynced, and gets its name by a hard link, which fails where the name
exists (a rename would hide that). On object stores a file appears with its whole content, by a conditional put.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from ..errors import Damaged
from .place import Remote, asking, place

Root = str | Path | Remote


def write_new(root: Root, name: str, data: bytes) -> None:
    """Create `root/name` with this content, complete and fsynced. FileExistsError where it exists."""
    with create(root, name) as out:
        out.write(data)


@contextlib.contextmanager
def create(root: Root, name: str) -> Iterator[IO[bytes]]:
    """A binary file that gets its name `root/name` when the block ends cleanly; FileExistsError where it exists."""
    final = place(root) / name
    if isinstance(final, Remote):
        with _conditional_put(final) as out:
            yield out
        return
    with _temporary(Path(str(root)), final) as (out, temporary):
        yield out
        _sync(out)
        os.link(temporary, final)
        fsync_folder(final.parent)


def replace(root: Root, name: str, data: bytes) -> None:
    """Atomically write a derived file that may be rewritten (progress, aggregates, report): never data."""
    final = place(root) / name
    if isinstance(final, Remote):
        final.replace(data)
        return
    with _temporary(Path(str(root)), final) as (out, temporary):
        out.write(data)
        _sync(out)
        os.replace(temporary, final)
        fsync_folder(final.parent)


@contextlib.contextmanager
def _temporary(root: Path, final: Path) -> Iterator[tuple[IO[bytes], Path]]:
    (root / "_tmp").mkdir(parents=True, exist_ok=True)
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = root / "_tmp" / f"{secrets.token_hex(8)}.part"
    try:
        with open(temporary, "xb") as out:
            yield out, temporary
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _conditional_put(final: Remote) -> Iterator[IO[bytes]]:
    """The store itself refuses an existing name, when the upload is completed.

    A refusal may hide a success: the reply to a put is lost, its client puts again, and finds the name taken by itself.
    So an object that stands with exactly this content is this one.
    """
    out = _Hashed(final)
    try:
        yield out  # ty: ignore[invalid-yield] (it has of IO what is written to)
    except BaseException:
        out.discard()
        raise
    try:
        out.finish()
    except FileExistsError:
        if not out.stands():
            raise


class _Hashed(io.RawIOBase):
    """A file on its way to a store, which remembers what was written."""

    def __init__(self, final: Remote):
        super().__init__()
        self._final, self._digest, self._size = final, hashlib.sha256(), 0
        self._out: Any = final.open("xb")

    def write(self, data: Any) -> int:
        self._digest.update(data)
        self._size += len(data)
        with asking(str(self._final)):
            return self._out.write(data)

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def finish(self) -> None:
        with asking(str(self._final)):
            self._out.close()

    def discard(self) -> None:
        with contextlib.suppress(Exception):
            self._out.discard()
        self._out.closed = True

    def stands(self) -> bool:
        """True if the store holds exactly what was written."""
        if self._final.stat().st_size != self._size:
            return False
        digest = hashlib.sha256()
        with self._final.open("rb") as standing, asking(str(self._final)):
            while piece := standing.read(1 << 24):
                digest.update(piece)
        return digest.digest() == self._digest.digest()


def _sync(out: IO[bytes]) -> None:
    out.flush()
    os.fsync(out.fileno())


def check_links(root: Root) -> None:
    """OSError where the file system of a local run folder has no hard links: nothing could be committed there."""
    if isinstance(place(root), Path):
        name = f"_tmp/{secrets.token_hex(8)}.link"
        write_new(root, name, b"")
        delete(root, name)


def delete(root: Root, name: str) -> None:
    """Remove a file that no commit names; missing is fine."""
    (place(root) / name).unlink(missing_ok=True)


def fsync_folder(folder: str | Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_json(root: Root, name: str) -> Any:
    """The mapping in `root/name`. FileNotFoundError where it is missing, Damaged where it holds no JSON mapping."""
    try:
        found = json.loads((place(root) / name).read_bytes())
    except ValueError as error:
        raise damaged(root, name, error) from None
    return _mapping(root, name, found)


def read_yaml(root: Root, name: str) -> Any:
    """As `read_json`, of YAML with plain values only."""
    import yaml

    try:
        found = yaml.load((place(root) / name).read_bytes(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError as error:
        raise damaged(root, name, error) from None
    return _mapping(root, name, found)


def _mapping(root: Root, name: str, found: Any) -> Any:
    if not isinstance(found, dict):
        raise damaged(root, name, TypeError("it holds no mapping"))
    return found


def damaged(root: Root, name: str, error: Exception) -> Damaged:
    """What to raise for `root/name`, which holds something else than was written there."""
    why = " ".join(str(error).split())
    return Damaged(f"{name} of {str(root)!r} cannot be read ({why}); restore it from a copy of the run")


def dump_yaml(value: Any) -> bytes:
    """YAML bytes of plain values, keys in the order given."""
    import yaml

    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    return yaml.dump(value, Dumper=dumper, sort_keys=False, allow_unicode=True, width=120).encode()


def dump_json(value: Any) -> bytes:
    """JSON bytes, keys in the order given, no NaN."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
