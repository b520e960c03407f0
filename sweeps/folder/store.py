"""Where a run folder is kept: on a disk, on an object store, or (for tests) in memory. All that touches one asks here.

Guarantees. A file is complete or absent: `create` and `write_new` give a name to a whole content, once, and of many
writers one wins; `replace` is for derived files only, and a reader sees the old content or the new. What was created is
on the disk when the call returns. A name leads nowhere but into the folder: parts like `..`, symbolic links, pipes and
devices are refused (`Damaged`), wherever they stand, in reading, writing, deleting and listing. A missing file is
FileNotFoundError, a taken name FileExistsError, and whatever else a store's client raises an OSError.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from mmap import mmap
from pathlib import Path
from typing import IO, Any, Protocol, TypeAlias, runtime_checkable

from .local import LocalStore
from .objects import ObjectStore, Remote


@runtime_checkable
class Store(Protocol):
    """One run folder. Names are relative to it, with `/` between their parts."""

    @property
    def root(self) -> Path | Remote:
        """Its path or URL, as `Run.root` shows it; nothing here opens files by it."""
        ...

    @property
    def name(self) -> str:
        """The last part of its path."""
        ...

    @property
    def address(self) -> str:
        """What `open_store` takes in another process of this machine, or on another node that sees the same disk."""
        ...

    @property
    def lasting(self) -> bool:
        """False where everything is gone when this process ends."""
        ...

    @property
    def reply_may_be_lost(self) -> bool:
        """True where an error may hide that what was asked has been done."""
        ...

    def sub(self, folder: str) -> Store:
        """A folder in it, as a store of its own."""
        ...

    def write_new(self, name: str, data: bytes) -> None:
        """Create a file with this content. FileExistsError: the name is taken."""
        ...

    def create(self, name: str) -> AbstractContextManager[IO[bytes]]:
        """A binary file that gets its name when the block ends cleanly; FileExistsError then, if the name is taken."""
        ...

    def replace(self, name: str, data: bytes) -> None:
        """Write a derived file (progress, aggregates, report) whole, whatever stands there."""
        ...

    def append(self, name: str) -> IO[str] | None:
        """A text file to append to, made if missing; None where nothing can be appended."""
        ...

    def delete(self, name: str) -> None:
        """Remove a file that no commit names; missing is fine."""
        ...

    def open(self, name: str) -> IO[bytes]:
        """A file to read from and seek in."""
        ...

    def read(self, name: str) -> bytes:
        """A file's content."""
        ...

    def read_all(self, names: Sequence[str]) -> Iterable[bytes]:
        """The contents of several files, asked for at once where that is faster."""
        ...

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of a file."""
        ...

    def mapped(self, name: str) -> mmap | None:
        """A file's content, mapped into memory and private to this process; None where only ranges can be read."""
        ...

    def arrow(self, name: str) -> str:
        """A file as Arrow names it, looked at first; Arrow opens it itself, with `arrow_fs`."""
        ...

    @property
    def arrow_fs(self) -> Any:
        """The file system to give to Arrow; None: the local one."""
        ...

    @property
    def arrow_base(self) -> str:
        """The folder as Arrow names it."""
        ...

    def exists(self, name: str) -> bool:
        """True if a file of this name is there."""
        ...

    def has_folder(self, name: str = "") -> bool:
        """True if a folder of this name is there; "": the run folder itself."""
        ...

    def size(self, name: str) -> int:
        """Bytes of a file."""
        ...

    def entries(self, folder: str = "") -> list[str]:
        """The names directly in a folder, sorted; none where it is missing."""
        ...

    def walk(self, folder: str = "") -> list[str]:
        """The files anywhere below a folder, by their names in the run folder."""
        ...

    def num_bytes(self) -> int:
        """Of all its files on a disk; 0 where nobody counts."""
        ...

    def free_bytes(self) -> int | None:
        """Free space of the disk on which it lies or will lie; None where there is no end."""
        ...

    def file_above(self) -> str | None:
        """What stands in the way of such a folder: a file of its own path, or of one above it."""
        ...

    def check_writable(self) -> None:
        """OSError where it, or what it would be made in, takes no folder, as far as that can be seen without a trace."""
        ...

    def probe(self) -> None:
        """OSError where a name would not be refused a second time: nothing could be committed there. Leaves nothing."""
        ...


Where: TypeAlias = str | Path | Remote | Store
"""A run folder as a user names it, or opened."""


class MemoryStore(ObjectStore):
    """A folder in this process's memory, for tests: an object store like others, and gone with the process."""

    def __init__(self):
        super().__init__(Remote(f"memory://{secrets.token_hex(8)}"))


def open_store(at: Where) -> Store:
    """The store at a path or a URL; nothing is looked at yet. `~` is the user's home, and `file://` a path."""
    if isinstance(at, (LocalStore, ObjectStore)):
        return at
    if isinstance(at, Remote):
        return ObjectStore(at)
    if isinstance(at, str) and at.startswith(("file://", "local://")):
        at = at.partition("://")[2] or "/"
    if isinstance(at, str) and "://" in at:
        return ObjectStore(Remote(at))
    return LocalStore(Path(str(at)).expanduser()) if isinstance(at, (str, Path)) else at


def within(names: Iterable[str], before: str, after: str) -> list[int]:
    """The numbers k of the names `<before><k><after>`, in order."""
    found = (n[len(before) : len(n) - len(after)] for n in names if n.startswith(before) and n.endswith(after))
    return sorted(int(number) for number in found if number.isdecimal() and number.isascii())
