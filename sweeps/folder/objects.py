"""A run folder on an object store: any fsspec URL (`s3://bucket/runs/x`, `gs://...`).

Object stores have no folders, links or fsync: a name appears with its whole content, and `create` asks the store to
refuse an existing one. `Remote` is an address there, with the part of `Path` that readers of a run need.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import functools
import hashlib
import io
import secrets
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, ParamSpec, TypeVar

from .paths import parts

P = ParamSpec("P")

T = TypeVar("T")

SLOW_S = 10.0
"""After how long without an answer a store is said to be slow. Its client goes on trying for about a minute."""


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

    @_asks
    def unlink(self, missing_ok: bool = False) -> None:
        try:
            self.fs.rm_file(self.path)
        except FileNotFoundError:
            if not missing_ok:
                raise


class ObjectStore:
    """A folder of an object store."""

    reply_may_be_lost = True

    def __init__(self, root: Remote):
        self.root = root

    def __str__(self) -> str:
        return str(self.root)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.root)!r})"

    @property
    def name(self) -> str:
        return self.root.name

    @property
    def address(self) -> str:
        return str(self.root)

    @property
    def lasting(self) -> bool:
        return not self.root.url.startswith("memory:")

    @property
    def arrow_base(self) -> str:
        return self.root.path

    @property
    def arrow_fs(self) -> Any:
        return self.root.fs

    def sub(self, folder: str) -> ObjectStore:
        return ObjectStore(self._at(folder))

    def _at(self, name: str) -> Remote:
        return self.root / "/".join(parts(self.root, name)) if name else self.root

    # ---- writing

    def write_new(self, name: str, data: bytes) -> None:
        with self.create(name) as out:
            out.write(data)

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        """The store itself refuses an existing name, when the upload is completed.

        A refusal may hide a success: the reply to a put is lost, its client puts again, and finds the name taken by
        itself. So an object that stands with exactly this content is this one.
        """
        out = _Hashed(self._at(name))
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

    def replace(self, name: str, data: bytes) -> None:
        self._at(name).replace(data)

    def append(self, name: str) -> None:
        return None

    def delete(self, name: str) -> None:
        self._at(name).unlink(missing_ok=True)

    # ---- reading

    def open(self, name: str) -> IO[bytes]:
        return self._at(name).open("rb")

    def read(self, name: str) -> bytes:
        return self._at(name).read_bytes()

    def read_all(self, names: Sequence[str]) -> Sequence[bytes]:
        paths = [self._at(name) for name in names]
        return paths[0].read_all(paths) if paths else []

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        return self._at(name).read_range(start, stop)

    def mapped(self, name: str) -> None:
        return None

    def arrow(self, name: str) -> str:
        return self._at(name).path

    def exists(self, name: str) -> bool:
        return self._at(name).is_file()

    def has_folder(self, name: str = "") -> bool:
        return self._at(name).is_dir()

    def size(self, name: str) -> int:
        return self._at(name).stat().st_size

    def entries(self, folder: str = "") -> list[str]:
        return [entry.name for entry in self._at(folder).iterdir()]

    def walk(self, folder: str = "") -> list[str]:
        return [entry.relative_to(self.root) for entry in self._at(folder).rglob("*")]

    # ---- the store

    def num_bytes(self) -> int:
        return 0

    def free_bytes(self) -> None:
        return None

    def file_above(self) -> str | None:
        return str(self) if self.root.is_file() else None

    def check_writable(self) -> None:
        """Is seen by the first put."""

    def probe(self) -> None:
        name = f"_tmp/{secrets.token_hex(16)}.probe"
        self.write_new(name, b"first")
        try:
            self.write_new(name, b"second")
        except FileExistsError:
            if self.read(name) == b"first":
                return
        finally:
            self.delete(name)
        raise OSError(
            errno.EOPNOTSUPP,
            f"the store of {str(self)!r} does not refuse a name that exists (it has no conditional puts), so that a second "
            "commit would take a first one's place",
        )


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
