"""Names inside a run folder: what is taken for one, and what to raise for anything else than a file or a folder."""

from __future__ import annotations

import stat

from ..errors import Damaged

DEEPEST = 24
"""Folders below each other: a capture of a run with copies of others has eight."""


def parts(root: object, name: str) -> tuple[str, ...]:
    """The folders and the file of a name such as `messages/u000000-ab.parquet`. Damaged: it leads out of the folder."""
    found = tuple(name.split("/")) if name else ()
    if len(found) > DEEPEST:
        raise Damaged(f"{'/'.join(found[:4])}/... of {str(root)!r} is {len(found)} folders deep; no run folder is")
    if any(part in ("", ".", "..") or "\0" in part for part in found):
        raise Damaged(f"{name!r} lies outside the run folder {str(root)!r}; a run folder names only what is in it")
    return found


KINDS = {
    stat.S_IFLNK: "a symbolic link", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFREG: "a file",
}  # fmt: skip


def kind(mode: int) -> str:
    """What a file's mode says that it is, in words."""
    return KINDS.get(stat.S_IFMT(mode), "no file")


def refused(root: object, name: str, found: str) -> Damaged:
    """What to raise where `name` is a link, a pipe, a device, or a folder in a file's place."""
    return Damaged(
        f"{name} of {str(root)!r} is {found}; a run folder holds plain files and folders only: "
        "take it away, or put a copy of the file there"
    )
