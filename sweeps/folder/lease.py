"""One driver at a time: a chain of `_lease/<n>.json`, each created if absent.

Invariants. Whoever created the highest number holds the lease. The holder creates the next number every `interval_s`;
nobody creates a number unless the highest one is released, or its holder was on this host and is dead, or it has stood
for `takeover_s` on the watcher's own monotonic clock. A holder that finds a number it did not write has lost the lease
and must stop; what it still writes is harmless, since commits are created if absent. Clocks are never compared.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import Held, RunRefused
from . import files, names
from .store import Store, Where, open_store, within


@contextmanager
def exclusively(root: Where) -> Iterator[None]:
    """Hold a folder's lease. RunRefused where a driver holds it."""
    lease = Lease(root)
    try:
        lease.acquire()
    except Held as error:
        raise RunRefused(str(error)) from None
    try:
        yield
    finally:
        lease.release()


KEPT = 1000
"""How many numbers stay; older ones are deleted by the holder."""


class Lease:
    """The right to drive one run folder. `acquire`, then look at `lost` now and then, then `release`."""

    def __init__(self, root: Where, *, interval_s: float = 10.0, takeover_s: float = 60.0, say=lambda line: None):
        self.store, self.interval_s, self.takeover_s, self._say = open_store(root), interval_s, takeover_s, say
        self.holder = secrets.token_hex(8)
        self.number = 0
        self.lost: str | None = None
        """Why the lease is gone, once it is."""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Take the lease, waiting up to `takeover_s` for a holder that may be dead. Held: another driver is alive."""
        latest = self._latest()
        if latest and not _is_over(standing := self._read(latest)):
            self._say(f"another driver (pid {standing.get('pid')} on {standing.get('host')}) held this folder; "
                      f"watching for {self.takeover_s:.0f} s whether it is alive")  # fmt: skip
            self._watch(latest, standing)
        self._create(latest + 1)
        self._thread = threading.Thread(target=self._renew, name="sweeps-lease", daemon=True)
        self._thread.start()

    def confirm(self) -> None:
        """Held where another driver has taken the lease since: asked before anything that a commit could not undo."""
        standing = self._read(self._latest())
        if self.lost or standing.get("holder") != self.holder:
            raise Held(self.lost or _refusal(self.store, standing))

    def release(self) -> None:
        """Stop renewing and leave a last number that says so."""
        self._stop.set()
        if self._thread:
            self._thread.join()
            self._thread = None
            if not self.lost:
                with contextlib.suppress(Held, OSError):
                    self._create(self.number + 1, released=True)

    def _watch(self, number: int, standing: dict[str, Any]) -> None:
        deadline = time.monotonic() + self.takeover_s
        while time.monotonic() < deadline:
            time.sleep(min(self.interval_s / 10, 1.0))
            if self._latest() != number:
                raise Held(_refusal(self.store, self._read(self._latest())))
            if _is_over(standing):
                return

    def _renew(self) -> None:
        while not self._stop.wait(self.interval_s):
            try:
                self._create(self.number + 1)
            except Held as error:
                self.lost = str(error)
                return
            except OSError as error:  # a full disk or a server that is away: the next round tries again
                self._say(f"the lease could not be renewed: {error}")
            if self.number % 100 == 0:
                self._prune()

    def _create(self, number: int, *, released: bool = False) -> None:
        content = {
            "number": number, "holder": self.holder, "released": released, "pid": os.getpid(),
            "started": _start_time(os.getpid()), "host": socket.gethostname(), "where": _where(),
        }  # fmt: skip
        try:
            self.store.write_new(names.lease(number), files.dump_json(content))
        except FileExistsError:
            standing = self._read(number)
            if standing.get("holder") != self.holder:
                raise Held(_refusal(self.store, standing)) from None
        if (latest := self._latest()) > number:
            raise Held(_refusal(self.store, self._read(latest)))
        self.number = number

    def _prune(self) -> None:
        for number in self._numbers():
            if number <= self.number - KEPT:
                self.store.delete(names.lease(number))

    def _numbers(self) -> list[int]:
        return within(self.store.entries(names.LEASE), "", ".json")

    def _latest(self) -> int:
        return max(self._numbers(), default=0)

    def _read(self, number: int) -> dict[str, Any]:
        return files.read_json(self.store, names.lease(number))


def latest(root: Where) -> dict[str, Any] | None:
    """The newest lease number's content, with `over`: whether its holder released it or is known to be dead."""
    lease = Lease(root)
    if not (number := lease._latest()):
        return None
    content = lease._read(number)
    return {**content, "over": _is_over(content)}


def _refusal(store: Store, standing: dict[str, Any]) -> str:
    return (
        f"another driver is running {store} (pid {standing.get('pid')} on {standing.get('host')}); "
        "stop it first, or give another run.dir"
    )


def _is_over(standing: dict[str, Any]) -> bool:
    """Released, or its process is known to be dead: it was on this host, as far as processes can be seen from here."""
    if standing.get("released"):
        return True
    return standing.get("where") == _where() and _start_time(standing.get("pid", 0)) != standing.get("started")


def _where() -> str | None:
    """This boot of this host and this pid namespace; None where that cannot be known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return secrets.token_hex(8)


def _start_time(pid: int) -> str | None:
    """When a process started (pids are used again); None if it is dead or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
