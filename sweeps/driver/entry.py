"""`run`: one sweep in one folder, from its lease to its exit code. Every expected error becomes one line."""

from __future__ import annotations

import errno
import itertools
import traceback
from collections.abc import Callable, Iterator

from interlens.errors import InterlensError

from .. import errors
from ..config.schema import SweepConfig
from ..errors import Held
from ..failpoints import reach
from ..folder import names
from ..folder.cells import Unit
from ..folder.lease import Lease
from ..folder.store import Store, Where, open_store
from ..plan.checks import require_models
from ..plan.expand import expand
from . import enter as enter_module
from .driver import Driver
from .enter import Entered, check_place, check_space, other_aggregates, other_analyzers, usable
from .executors.base import REPLICA
from .parts import LedgerError
from .progress import Progress
from .stops import Stop, command, signals


def run(
    config: SweepConfig, run_dir: Where, *, replica: str = REPLICA,
    enter: Callable[[SweepConfig, Store, Callable[[], None]], Entered] | None = None,
) -> int:  # fmt: skip
    """Run what is missing of a sweep in `run_dir` and return the exit code. Never raises for what a run can meet.

    enter: starts or continues the folder; None: `folder.enter`, from the configuration.
    """
    root = open_store(run_dir)
    progress = Progress(root, config.run.progress, config.run.interval_s)
    lease = Lease(root, say=progress.log)
    try:
        with signals(_stop_here):
            units = _before(config, root, replica) if enter is None else None
            with usable(root):
                lease.acquire()
            reach("driver.leased")
            entered = (
                enter(config, root, lease.confirm) if enter else enter_module.enter(config, root, lease.confirm, units)
            )
            reach("driver.planned")
            _tell_differences(config, root, entered, progress, own_plan=enter is None)
            progress.event("started", found=entered.state, new_cells=entered.new_cells, command=command())
            return Driver(config, root, progress, lease, replica).run()
    except Stop as stop:
        progress.error(f"stopped: {stop.reason}; continue with: {command()}")
        return stop.code
    except (Held, errors.RunRefused, LedgerError) as error:
        hint = f"; `sweeps verify {root} --deep --reopen` shows and mends it" * isinstance(error, LedgerError)
        progress.error(f"sweeps: refused: {error}{hint}")
        return 5
    except OSError as error:
        progress.error(f"sweeps: {error}")
        return 5 if error.errno in (errno.ENOSPC, errno.EDQUOT) else 1
    except InterlensError as error:
        progress.error(f"sweeps: {error}")
        if lease.number:
            progress.event("error", error=str(error))
        return 1
    except Exception as error:
        unreadable = type(error).__module__.startswith("pyarrow")
        hint = f"sweeps: {error}; `sweeps verify {root} --deep` says what is wrong"
        progress.error(hint if unreadable else traceback.format_exc())
        progress.event("error", error=str(error))
        return 1
    finally:
        lease.release()
        progress.close()


def _tell_differences(config: SweepConfig, root: Store, entered: Entered, progress: Progress, own_plan: bool) -> None:
    """Say which aggregates, analyzers and judges a continued folder was not begun with."""
    if entered.state != "new" and (others := other_aggregates(config, root)):
        progress.log(f"aggregates that this folder was not begun with: {', '.join(others)}; "
                     f"`sweeps aggregate {root} name=... kind=...` computes others from what is stored")  # fmt: skip
    if entered.state != "new" and own_plan and other_analyzers(config, root):
        progress.log("this folder was begun with other analyzers or judges: cells that are finished keep what those "
                     "said, in the same columns")  # fmt: skip


def _before(config: SweepConfig, root: Store, replica: str) -> Iterator[Unit] | None:
    """Refuse what can be refused while nothing is written; the units of a new folder, begun to be expanded."""
    with usable(root):
        check_place(root)
        if root.exists(names.RUN):
            return None
        root.check_writable()
    if not root.lasting:
        raise errors.RunRefused(f"run.dir {str(root)!r} is gone when this process ends; name a folder or a bucket")
    check_space(config, root)
    if replica == REPLICA:
        require_models(config)
    units = expand(config)
    return itertools.chain([next(units)], units)


def _stop_here(name: str) -> None:
    """Where no unit is in flight everything can be cut off at any line, as by a kill."""
    raise Stop(4, f"received {name}")
