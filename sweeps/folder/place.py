"""Where a run folder is: a local path, or any fsspec URL (`s3://bucket/runs/x`, `gs://...`, `memory://...`).

`place` gives a `Path` or a `Remote`, which behaves like one as far as run folders need it. Object stores have no
folders, links or fsync: a name appears with its whole content, and `create` asks the store to refuse an existing one.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple, ParamSpec, TypeVar

P = ParamSpec("P")

T = TypeVar("T")

SLOW_S = 10.0
"""After how long without an answer a store is said to be slow. Its client goes on trying for about a minute."""


def place(root: str | Path | Remote) -> Path | Remote:
    """`root` as something to build names under."""
    if isinstance(root, Remote):
        return root
    return Remote(root) if isinstance(root, str) and "://" in root else Path(root)


@contextlib.contextmanager
def asking(url: str) -> Iterator[None]:
    """Inside, a store is asked: whatever its client raises is an OSError, and a long wait is said on stderr."""
    slow = f"sweeps: no answer for {SLOW_S:.0f} s about {url}; still trying"
    timer = threading.Timer(SLOW_S, lambda: print(slow, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # each client has its own kinds
        raise OSError(errno.EIO, f"{url}: {type(error).__name__}: {error}") from error
    finally:
        timer.cancel()


def _asks(method: Callable[P, T]) -> Callable[P, T]:
    @functools.wraps(method)
    def asked(*args: P.args, **kwargs: P.kwargs) -> T:
        with asking(str(args[0])):
            return method(*args, **kwargs)

    return asked


class Stat(NamedTuple):
    """The one thing asked of a remote file's stat."""

    st_size: int


@functools.total_ordering
class Remote:
    """A file or folder of an fsspec file system, with the part of `Path` that run folders use."""

    def __init__(self, url: str):
        self.url = url.rstrip("/")

    @functools.cached_property
    def fs(self) -> Any:
        """The file system, shared by equal protocols and options."""
        import fsspec

        return fsspec.core.url_to_fs(self.url)[0]

    @property
    def path(self) -> str:
        """As the file system itself names it."""
        return self.fs._strip_protocol(self.url)

    def __truediv__(self, name: str | Path) -> Remote:
        return Remote(f"{self.url}/{name}")

    def __str__(self) -> str:
        return self.url

    def __repr__(self) -> str:
        return f"Remote({self.url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and self.url == other.url

    def __lt__(self, other: Remote) -> bool:
        return self.url < other.url

    def __hash__(self) -> int:
        return hash(self.url)

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def stem(self) -> str:
        return self.name.rpartition(".")[0] or self.name

    @property
    def suffix(self) -> str:
        dot = self.name.rfind(".")
        return self.name[dot:] if dot > 0 else ""

    @property
    def parent(self) -> Remote:
        return Remote(self.url.rpartition("/")[0])

    def relative_to(self, root: Remote) -> str:
        if not self.url.startswith(f"{root.url}/"):
            raise ValueError(f"{self} does not lie under {root}")
        return self.url[len(root.url) + 1 :]

    @_asks
    def exists(self) -> bool:
        self.fs.invalidate_cache()
        return self.fs.exists(self.path)

    @_asks
    def is_file(self) -> bool:
        self.fs.invalidate_cache()
        return self.fs.isfile(self.path)

    @_asks
    def is_dir(self) -> bool:
        self.fs.invalidate_cache()
        return self.fs.isdir(self.path)

    @_asks
    def stat(self) -> Stat:
        return Stat(st_size=self.fs.size(self.path))

    @_asks
    def read_bytes(self) -> bytes:
        return self.fs.cat_file(self.path)

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    @_asks
    def read_range(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop)."""
        return self.fs.cat_file(self.path, start=start, end=stop)

    @_asks
    def open(self, mode: str = "rb", **options: Any) -> IO[Any]:
        return self.fs.open(self.path, mode, **options)

    def iterdir(self) -> Iterator[Remote]:
        """Files and folders directly below; none where the folder does not exist."""
        try:
            with asking(self.url):
                self.fs.invalidate_cache()
                found = self.fs.ls(self.path, detail=False)
        except FileNotFoundError:
            return iter(())
        names = (str(entry).rstrip("/").rpartition("/")[2] for entry in found)
        return (self / name for name in sorted(names) if name)

    def glob(self, pattern: str) -> Iterator[Remote]:
        """Entries directly below whose name matches."""
        return (entry for entry in self.iterdir() if fnmatch.fnmatchcase(entry.name, pattern))

    def rglob(self, pattern: str) -> Iterator[Remote]:
        """Files anywhere below whose name matches."""
        try:
            with asking(self.url):
                self.fs.invalidate_cache()
                found = self.fs.find(self.path)
        except FileNotFoundError:
            return
        base = self.path.rstrip("/")
        for entry in sorted(found):
            if fnmatch.fnmatchcase(entry.rpartition("/")[2], pattern):
                yield self / entry[len(base) + 1 :]

    @_asks
    def replace(self, data: bytes) -> None:
        """Put this content under the name, whatever stands there."""
        self.fs.pipe_file(self.path, data)

    @_asks
    def read_all(self, paths: list[Remote]) -> list[bytes]:
        """The content of several files of this file system, asked for at once."""
        found = self.fs.cat([path.path for path in paths])
        return [found[path.path] for path in paths]

    def mkdir(self, **options: Any) -> None:
        """Folders come with their files."""

    @_asks
    def unlink(self, missing_ok: bool = False) -> None:
        try:
            self.fs.rm_file(self.path)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def resolve(self) -> Remote:
        return self


def arrow(path: Path | Remote) -> tuple[str, Any]:
    """A path as Arrow wants it, and the file system to give along (None: the local one)."""
    return (path.path, path.fs) if isinstance(path, Remote) else (str(path), None)
