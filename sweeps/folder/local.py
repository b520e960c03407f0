"""A run folder on a disk, in which no name is followed out of it.

Every name is resolved part by part from the folder itself, each part opened without following links; what is read,
appended or listed must be a plain file or a folder. Every write goes through a random name in `_tmp/`, is fsynced, and
gets its own name by a hard link, which fails where the name exists (a rename would hide that).
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from .paths import kind, parts, refused

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""A pipe is opened without waiting for its other end; that it is none is asked before and after."""


class LocalStore:
    """A folder of a local or network file system. `path` itself may be reached through links: its user named it."""

    lasting = True
    reply_may_be_lost = False
    arrow_fs = None

    def __init__(self, path: str | Path, inside: tuple[str, ...] = ()):
        """`inside`: folders below `path` that this is, themselves resolved without following links."""
        self._base, self._inside = Path(path), inside
        self.root = self._base.joinpath(*inside)

    def __str__(self) -> str:
        return str(self.root)

    def __repr__(self) -> str:
        return f"LocalStore({str(self.root)!r})"

    @property
    def name(self) -> str:
        return self.root.name

    @property
    def arrow_base(self) -> str:
        return str(self.root)

    @property
    def address(self) -> str:
        return str(self.root.absolute())

    def sub(self, folder: str) -> LocalStore:
        return LocalStore(self._base, (*self._inside, *parts(self.root, folder)))

    # ---- writing

    def write_new(self, name: str, data: bytes) -> None:
        with self.create(name) as out:
            out.write(data)

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        with self._temporary() as (out, temporary, folder):
            yield out
            _sync(out)
            with self._parent(name, make=True) as (above, last):
                os.link(temporary, last, src_dir_fd=folder, dst_dir_fd=above, follow_symlinks=False)
                fsync_folder(above)

    def replace(self, name: str, data: bytes) -> None:
        with self._temporary() as (out, temporary, folder):
            out.write(data)
            _sync(out)
            with self._parent(name, make=True) as (above, last):
                self._is_file(above, last, name)
                os.replace(temporary, last, src_dir_fd=folder, dst_dir_fd=above)
                fsync_folder(above)

    def append(self, name: str) -> IO[str]:
        if self.exists(name) and self._links(name) > 1:
            self.replace(name, self.read(name))  # a name elsewhere stands for the same file: from here on a copy
        with self._parent(name, make=True) as (above, last):
            self._is_file(above, last, name)
            file = os.open(last, FILE | os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666, dir_fd=above)
        return open(self._checked(file, name), "a", encoding="utf-8")

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError), self._parent(name) as (above, last):
            self._is_file(above, last, name)
            os.unlink(last, dir_fd=above)

    # ---- reading

    def open(self, name: str) -> IO[bytes]:
        return open(self._file(name), "rb")

    def read(self, name: str) -> bytes:
        with self.open(name) as file:
            return file.read()

    def read_all(self, names: Sequence[str]) -> Iterator[bytes]:
        for folder, group in itertools.groupby(names, lambda name: name.rpartition("/")[0]):
            with self._folder(parts(self.root, folder)) as above, _saying(self.root, folder):
                for name in group:
                    with open(self._opened(above, parts(self.root, name)[-1], name), "rb", buffering=0) as file:
                        yield file.readall()

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        with self.open(name) as file:
            file.seek(start)
            return file.read(stop - start)

    def mapped(self, name: str) -> mmap.mmap:
        with self.open(name) as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def arrow(self, name: str) -> str:
        os.close(self._file(name))
        return str(self.root / name)

    def exists(self, name: str) -> bool:
        try:
            with self._parent(name) as (above, last):
                return self._is_file(above, last, name, or_folder=True)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def has_folder(self, name: str = "") -> bool:
        try:
            with self._folder(parts(self.root, name)):
                return True
        except (FileNotFoundError, NotADirectoryError):
            return False

    def size(self, name: str) -> int:
        file = self._file(name)
        try:
            return os.fstat(file).st_size
        finally:
            os.close(file)

    def entries(self, folder: str = "") -> list[str]:
        try:
            with self._folder(parts(self.root, folder)) as opened:
                return sorted(os.listdir(opened))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def walk(self, folder: str = "") -> list[str]:
        found = []
        for name in self.entries(folder):
            inner = f"{folder}/{name}" if folder else name
            with self._parent(inner) as (above, last):
                is_folder = stat.S_ISDIR(os.stat(last, dir_fd=above, follow_symlinks=False).st_mode)
            if is_folder:
                found += self.walk(inner)
            elif self.exists(inner):
                found.append(inner)
        return found

    # ---- the disk

    def num_bytes(self) -> int:
        """Of all files in the folder; links are not followed."""
        total, left = 0, [str(self.root)]
        while left:
            with contextlib.suppress(OSError), os.scandir(left.pop()) as found:
                for entry in found:
                    if entry.is_dir(follow_symlinks=False):
                        left.append(entry.path)
                    else:
                        total += entry.stat(follow_symlinks=False).st_size
        return total

    def free_bytes(self) -> int:
        path = self.root.absolute()
        while not path.exists():
            path = path.parent
        return shutil.disk_usage(path).free

    def file_above(self) -> str | None:
        there = next((p for p in (self.root, *self.root.parents) if p.exists()), self.root)
        return str(there) if there.exists() and not there.is_dir() else None

    def check_writable(self) -> None:
        there = [self.root, *self.root.absolute().parents]
        first = next(n for n, path in enumerate(there) if path.exists())
        try:
            os.rmdir(tempfile.mkdtemp(dir=there[first]))
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(there[max(first - 1, 0)])) from None

    def probe(self) -> None:
        for folder in ("_tmp", "plan"):
            name = f"{folder}/{secrets.token_hex(8)}.link"
            try:
                self.write_new(name, b"")
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise
                raise OSError(error.errno, f"no hard links on the disk of {str(self)!r} ({error.strerror})") from None
            finally:
                self.delete(name)

    # ---- resolving names

    @contextlib.contextmanager
    def _folder(self, below: Sequence[str], make: bool = False) -> Iterator[int]:
        """A handle of a folder inside, each part opened without following a link."""
        if make:
            self._base.mkdir(parents=True, exist_ok=True)
        with _saying(self.root, ""):
            opened = os.open(self._base, FOLDER & ~os.O_NOFOLLOW)
        try:
            for number, part in enumerate(whole := (*self._inside, *below)):
                name = "/".join(whole[: number + 1])
                with _saying(self._base, name):
                    if make:
                        with contextlib.suppress(FileExistsError):
                            os.mkdir(part, dir_fd=opened)
                    inner = self._inner(opened, part, name)
                os.close(opened)
                opened = inner
            yield opened
        finally:
            os.close(opened)

    def _inner(self, above: int, part: str, name: str) -> int:
        try:
            return os.open(part, FOLDER, dir_fd=above)
        except NotADirectoryError:
            found = os.stat(part, dir_fd=above, follow_symlinks=False).st_mode
            if stat.S_ISREG(found):
                raise
            raise refused(self._base, name, kind(found)) from None

    @contextlib.contextmanager
    def _parent(self, name: str, make: bool = False) -> Iterator[tuple[int, str]]:
        *folders, last = parts(self.root, name)
        with self._folder(folders, make) as opened, _saying(self.root, name):
            yield opened, last

    def _is_file(self, above: int, last: str, name: str, or_folder: bool = False) -> bool:
        """True if it is a plain file, False if nothing is there (or a folder may be). Damaged: it is anything else."""
        try:
            found = os.stat(last, dir_fd=above, follow_symlinks=False).st_mode
        except FileNotFoundError:
            return False
        if not stat.S_ISREG(found) and not (or_folder and stat.S_ISDIR(found)):
            raise refused(self.root, name, kind(found))
        return stat.S_ISREG(found)

    def _file(self, name: str) -> int:
        with self._parent(name) as (above, last):
            return self._opened(above, last, name)

    def _opened(self, above: int, last: str, name: str) -> int:
        self._is_file(above, last, name)
        return self._checked(os.open(last, FILE | os.O_RDONLY, dir_fd=above), name)

    def _checked(self, file: int, name: str) -> int:
        found = os.fstat(file).st_mode
        if stat.S_ISREG(found):
            return file
        os.close(file)
        raise refused(self.root, name, kind(found))

    def _links(self, name: str) -> int:
        file = self._file(name)
        try:
            return os.fstat(file).st_nlink
        finally:
            os.close(file)

    @contextlib.contextmanager
    def _temporary(self) -> Iterator[tuple[IO[bytes], str, int]]:
        """A new file under a random name in `_tmp/`, that name, and a handle of `_tmp/`; gone when the block ends."""
        name = f"{secrets.token_hex(16)}.part"
        with self._folder(("_tmp",), make=True) as folder:
            with _saying(self.root, f"_tmp/{name}"):
                file = os.open(name, FILE | os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=folder)
            try:
                with open(file, "wb") as out:
                    yield out, name, folder
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=folder)


@contextlib.contextmanager
def _saying(root: Path, name: str) -> Iterator[None]:
    """Errors name the whole path: the system knows only the last part of it."""
    try:
        yield
    except OSError as error:
        if not isinstance(error.filename, str) or os.path.isabs(error.filename):
            raise
        raise OSError(error.errno, error.strerror, str(root / name) if name else str(root)) from None


def _sync(out: IO[bytes]) -> None:
    out.flush()
    os.fsync(out.fileno())


def fsync_folder(folder: int) -> None:
    """Make the names in an open folder durable."""
    os.fsync(folder)


@contextlib.contextmanager
def whole_file(path: str | Path) -> Iterator[IO[bytes]]:
    """A file outside run folders that its user named: it appears whole, over what stood there, when the block ends.

    Written under a random name beside it, which is opened without following links; a link at `path` is replaced.
    """
    final = Path(path)
    temporary = final.with_name(f".{secrets.token_hex(16)}.part")
    final.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(temporary, FILE | os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with open(file, "w+b") as out:
            yield out
            _sync(out)
        os.replace(temporary, final)
    finally:
        temporary.unlink(missing_ok=True)
