"""Files that are either complete or absent. Every write goes through `_tmp/`, is fsynced, and gets its name by a hard
link, which fails where the name exists; nothing is ever renamed over anything or rewritten."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from interlens.errors import InterlensError

_COMMIT = re.compile(r"u\d+(\.(\d+|r))*\.json")


class Damaged(InterlensError):
    """A file of a run folder that was written whole is no longer so."""


def write_new(root: str | Path, name: str, data: bytes) -> Path:
    """Create `root/name` with this content, complete and fsynced. FileExistsError where it exists."""
    with create(root, name) as out:
        out.write(data)
    return Path(root) / name


@contextlib.contextmanager
def create(root: str | Path, name: str) -> Iterator[IO[bytes]]:
    """A binary file that gets its name `root/name` when the block ends cleanly; FileExistsError where it exists."""
    root = Path(root)
    final = root / name
    (root / "_tmp").mkdir(parents=True, exist_ok=True)
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = root / "_tmp" / f"{secrets.token_hex(8)}.part"
    try:
        with open(temporary, "xb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        os.link(temporary, final)
        fsync_folder(final.parent)
    finally:
        temporary.unlink(missing_ok=True)


def replace(root: str | Path, name: str, data: bytes) -> None:
    """Atomically write a derived file that may be rewritten (progress, aggregates, report): never data."""
    root = Path(root)
    final = root / name
    (root / "_tmp").mkdir(parents=True, exist_ok=True)
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = root / "_tmp" / f"{secrets.token_hex(8)}.part"
    try:
        with open(temporary, "xb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, final)
        fsync_folder(final.parent)
    finally:
        temporary.unlink(missing_ok=True)


def delete(root: str | Path, name: str) -> None:
    """Remove a file that no commit names; missing is fine."""
    (Path(root) / name).unlink(missing_ok=True)


def fsync_folder(folder: str | Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_json(root: str | Path, name: str) -> Any:
    """The parsed content of `root/name`. FileNotFoundError where it is missing."""
    return json.loads((Path(root) / name).read_bytes())


def read_yaml(root: str | Path, name: str) -> Any:
    """The parsed content of `root/name`, plain values only. FileNotFoundError where it is missing."""
    import yaml

    return yaml.load((Path(root) / name).read_bytes(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def dump_yaml(value: Any) -> bytes:
    """YAML bytes of plain values, keys in the order given."""
    import yaml

    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    return yaml.dump(value, Dumper=dumper, sort_keys=False, allow_unicode=True, width=120).encode()


def dump_json(value: Any) -> bytes:
    """JSON bytes, keys in the order given, no NaN."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


@dataclass(frozen=True, kw_only=True)
class Commit:
    """What `_commits/<unit>.json` says: the one truth about a unit."""

    unit: str
    attempt: str
    cells: tuple[str, ...] = ()
    """Ids of the cells it holds."""
    failed: tuple[str, ...] = ()
    trunks: tuple[str, ...] = ()
    failed_trunks: tuple[str, ...] = ()
    files: tuple[dict[str, Any], ...] = ()
    """Each {path, table, rows, bytes, sha256}; path relative to the run folder."""
    children: tuple[dict[str, Any], ...] = ()
    """`Unit.to_dict()` of each child."""
    counters: dict[str, Any] = field(default_factory=dict)
    """Totals for status: tokens generated, seconds, ..."""

    @property
    def num_cells(self) -> int:
        return len(self.cells)


def read_commit(root: str | Path, unit: str) -> Commit | None:
    """The commit of a unit, or None."""
    try:
        return _parse(Path(root) / f"_commits/{unit}.json")
    except FileNotFoundError:
        return None


def list_commits(root: str | Path) -> Iterator[Commit]:
    """Every commit of the folder, in order of unit id: a unit before its children. Other names there are ignored."""
    folder = Path(root) / "_commits"
    names = os.listdir(folder) if folder.is_dir() else []
    for name in sorted((n.removesuffix(".json") for n in names if _COMMIT.fullmatch(n)), key=unit_order):
        yield _parse(folder / f"{name}.json")


def unit_order(unit: str) -> tuple:
    """Sorts unit ids: a unit, then its children `.0`, `.1`, then its retry `.r`."""
    return tuple(
        (1, int(step)) if step.isdigit() else (0 if i == 0 else 2, step) for i, step in enumerate(unit.split("."))
    )


def write_commit(root: str | Path, commit: Commit) -> str:
    """Create the unit's commit: "won", or "lost" where another attempt's stands."""
    try:
        write_new(root, f"_commits/{commit.unit}.json", dump_json(asdict(commit)))
    except FileExistsError:
        standing = read_commit(root, commit.unit)
        return "won" if standing is not None and standing.attempt == commit.attempt else "lost"
    return "won"


def _parse(path: Path) -> Commit:
    data = path.read_bytes()
    try:
        return Commit(**{key: tuple(v) if isinstance(v, list) else v for key, v in json.loads(data).items()})
    except (ValueError, TypeError, AttributeError) as error:
        raise Damaged(
            f"the commit {str(path)!r} cannot be read ({error}); restore it, or delete it to run its unit again"
        ) from None
