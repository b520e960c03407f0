"""A list that counts its changes."""

from __future__ import annotations

import functools


class CountedList(list):
    """A list that counts its changes, so that indexes over it can tell whether they are still true."""

    changes = 0


def _counting(name: str):
    method = getattr(list, name)

    @functools.wraps(method)
    def changed(self, *args, **kwargs):
        self.changes += 1
        return method(self, *args, **kwargs)

    return changed


for _name in (
    "append", "extend", "insert", "remove", "pop", "clear", "sort", "reverse", "__setitem__", "__delitem__", "__iadd__",
    "__imul__",
):  # fmt: skip
    setattr(CountedList, _name, _counting(_name))
