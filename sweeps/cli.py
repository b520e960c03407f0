"""`sweeps plan | run | status | report | show | ...`: one command line over a configuration or a run folder.

Exit codes: 0 complete; 1 error; 3 complete with failed cells; 4 stopped, the same command continues; 5 refused (another
driver, another configuration, no space), nothing was changed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from importlib import metadata
from typing import Any

from interlens.errors import InterlensError

from .commands.parsing import Done, Parser

COMPLETE, ERROR, FAILED_CELLS, STOPPED, REFUSED = 0, 1, 3, 4, 5

_WORST_FIRST = (ERROR, REFUSED, FAILED_CELLS, COMPLETE)

USAGE = """sweeps <command> ...

  plan   [key=value ...]   how large a sweep would be: cells, units, tokens, bytes; loads no model
                           (--measure runs one unit and says how long the whole would take;
                           --config-dir DIR finds experiments of your own, as with run)
  run    [key=value ...]   run it, or continue it; --help shows the configuration, -m runs several
  status DIR               what a run folder holds and how far it is
  report DIR               write the page of a run, DIR/report/index.html
  capture DIR layers=20,24 [sites=...]     more layers or sites of a finished run, sampling nothing again
  aggregate DIR [name=... key=value ...]   aggregates again, or new ones, from what is stored; loads no model
  analyze DIR name=MODULE:FUNCTION         outcomes of stored conversations, new or again: an analyzer, or a judge
  show   DIR CELL          print one conversation (any beginning of a cell's id)
  compare A B              the same cells in two runs: tokens that changed, log-probabilities, routing
  export DIR OUT key=value ...   vectors as one .parquet or .npz file, chosen by framing=warm --layers 16 --where ...;
                                 directions as .gguf for llama.cpp
  verify DIR [--deep]      check every file and row of a run against its commits
                           (--reopen lets damaged units run again)
  gc     DIR [--dry-run]   delete what no commit names

Choose an experiment with experiment=NAME; change anything with key=value.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. One line on stderr says what is wrong; no traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE)
        return COMPLETE if arguments else ERROR
    if arguments[0] == "--version":
        print(f"sweeps {metadata.version('interlens-sweeps')}")
        return COMPLETE
    name, rest = arguments[0], arguments[1:]
    if name in OWN_CODE and os.getcwd() not in sys.path and not _near_a_run():
        sys.path.append(os.getcwd())  # where the analyzers and aggregates are that a user's own configuration names
    if name not in COMMANDS:
        print(f"sweeps: no command {name!r}; there are: {', '.join(COMMANDS)}", file=sys.stderr)
        return ERROR
    code = _guarded(lambda: COMMANDS[name](rest))
    if code == STOPPED and argv is None and _units_left():
        sys.stdout.flush()
        os._exit(code)  # a second Ctrl-C: Python would wait for the threads of units
    return code


def _units_left() -> bool:
    """True if threads that Python waits for at its end still run."""
    return any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread())


OWN_CODE = ("plan", "run", "aggregate", "analyze")
"""Commands for which the user may name code of their own; the others read a folder, and import nothing beside it."""


def _near_a_run() -> bool:
    """True where the working directory lies in a run folder or holds one: what lies there may be a stranger's."""
    here = os.path.abspath(os.getcwd())
    above = [here]
    while (parent := os.path.dirname(above[-1])) != above[-1]:
        above.append(parent)
    if any(os.path.lexists(os.path.join(folder, "run.json")) for folder in above):
        return True
    with os.scandir(here) as entries:
        return any(os.path.lexists(os.path.join(entry.path, "run.json")) for entry in entries)


def _guarded(action: Callable[[], int]) -> int:
    """Expected errors as one line and an exit code."""
    from .errors import RunRefused
    from .redact import redact

    try:
        return action()
    except Done:
        return COMPLETE
    except RunRefused as error:
        print(f"sweeps: refused: {redact(str(error))}", file=sys.stderr)
        return REFUSED
    except InterlensError as error:
        print(f"sweeps: {redact(str(error))}", file=sys.stderr)
        return ERROR
    except KeyboardInterrupt:
        return STOPPED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return COMPLETE
    except Exception as error:
        if not isinstance(error, OSError) and not type(error).__module__.startswith("pyarrow"):
            raise
        named = error.filename if isinstance(error, FileNotFoundError) and error.filename else error
        text = redact(" ".join(str(named).split()))
        missing = "no such file: " * (isinstance(error, FileNotFoundError) and "o such file" not in text)
        print(f"sweeps: {missing}{text}; `sweeps verify` says what is wrong with a folder", file=sys.stderr)
        return ERROR


def _plan(arguments: list[str]) -> int:
    from .commands import plan
    from .compose import load
    from .errors import ConfigError

    usage = "sweeps plan [--measure] [--config-dir DIR] [key=value ...]"
    parser = Parser("sweeps plan", usage=usage, allow_abbrev=False, description="How large a sweep would be.")
    parser.add_argument("--measure", action="store_true", help="run one unit, and say how long the whole would take")
    parser.add_argument("--config-dir", "-cd", metavar="DIR", help="find experiments of your own in DIR/experiment")
    try:
        options, overrides = parser.parse_known_args(arguments)
    except SystemExit:  # --help
        raise Done from None
    if options.config_dir is not None:
        if not os.path.isdir(options.config_dir):
            raise ConfigError(f"no folder {options.config_dir!r} for --config-dir")
        overrides.append(f"hydra.searchpath=['file://{os.path.abspath(options.config_dir)}']")
    notes: list[str] = []
    config = load(overrides, notes)
    print("\n".join([plan.describe(config), *notes]))
    if options.measure:
        print(plan.extrapolate(config, plan.measure(config)))
    return COMPLETE


def _run(arguments: list[str]) -> int:
    """A Hydra application: its flags work, and nothing of it is left on the disk."""
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    from .compose import explain, relaxed
    from .config.shipped import conf_dir
    from .driver.executors import pool
    from .errors import ConfigError

    codes: list[int] = []
    begun: list[bool] = []
    typed = [sys.argv[0], "run", *arguments]

    def task(composed: Any) -> None:
        begun.append(True)
        sys.argv = typed  # what a message may tell its reader to type again
        if STOPPED not in codes:
            codes.append(_guarded(lambda: run_composed(composed)))

    multirun = any(a in ("-m", "--multirun") for a in arguments)
    given = [a if a.startswith("-") else relaxed([a])[0] for a in _flags_first(arguments)]
    app = hydra.main(config_path=str(conf_dir()), config_name="config", version_base="1.3")(task)
    with (
        tempfile.TemporaryDirectory() as scratch,
        _program("sweeps run", given + [f"hydra.sweep.dir={scratch}"] * multirun),
        pool.shared(),
    ):
        try:
            app()
        except (HydraException, OmegaConfBaseException, YAMLError) as error:
            raise ConfigError(explain(error)) from None
        except ValueError as error:  # what Hydra says of its flags; once a job has begun, a fault of ours
            if begun:
                raise
            raise ConfigError(explain(error)) from None
        except SystemExit as error:  # --help and the like, or argparse's own complaint
            return COMPLETE if not error.code else ERROR
    return STOPPED if STOPPED in codes else next((c for c in _WORST_FIRST if c in codes), COMPLETE)


def _flags_first(arguments: list[str]) -> list[str]:
    """Flags before overrides: Hydra reads overrides from one place only, as in `key=value -m`, not `a=1 -m b=2`."""
    flags = [a for a, before in zip(arguments, ["", *arguments], strict=False)
             if "=" not in a or a[0] == "-" or before in _TAKE_A_PATH]  # fmt: skip
    return [*flags, *(a for a in arguments if a not in flags)]


_TAKE_A_PATH = ("--config-dir", "-cd", "--config-path", "-cp")


def run_composed(composed: Any) -> int:
    """Run what Hydra composed; the driver's exit code."""
    from hydra.core.hydra_config import HydraConfig

    from .compose import from_composed

    config = from_composed(composed, HydraConfig.get())
    from .driver import entry

    return entry.run(config, config.run.dir)


@contextmanager
def _program(name: str, arguments: list[str]):
    """Hydra reads `sys.argv`, and hides tracebacks of composition unless told not to."""
    argv, full = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv, os.environ["HYDRA_FULL_ERROR"] = [name, *arguments], "1"
    try:
        yield
    finally:
        sys.argv = argv
        if full is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full


def _parsed(arguments: list[str], name: str, about: str, *wanted: str) -> argparse.Namespace:
    """The arguments of a command over a run folder; ConfigError, with its usage, for what does not fit."""
    parser = Parser(prog=f"sweeps {name}", description=about)
    for argument in wanted:
        parser.add_argument(argument, action="store_true" if argument.startswith("--") else "store")
    try:
        return parser.parse_args(arguments)
    except SystemExit:  # --help
        raise Done from None


def _status(arguments: list[str]) -> int:
    from .errors import ConfigError
    from .folder import status

    given = _parsed(arguments, "status", "How far a run is, from its folder alone.", "dir")
    try:
        print("\n".join(status.status(given.dir)))
    except FileNotFoundError as error:
        raise ConfigError(str(error)) from None
    return COMPLETE


def _report(arguments: list[str]) -> int:
    from .folder.blame import blaming
    from .report.page import write_report
    from .run import open as open_run

    given = _parsed(arguments, "report", "Write the page of a run.", "dir")
    run = open_run(given.dir)
    with blaming(run):
        print(write_report(run))
    return COMPLETE


def _aggregate(arguments: list[str]) -> int:
    from .commands.aggregate import HELP, aggregate
    from .folder.blame import blaming
    from .run import open as open_run

    if not arguments or arguments[0] in ("-h", "--help"):
        print(HELP)
        return COMPLETE if arguments else ERROR
    run = open_run(arguments[0])
    with blaming(run):
        for path, said in aggregate(run, arguments[1:]).items():
            print("\n  ".join([str(path), *said]))
    return COMPLETE


def _analyze(arguments: list[str]) -> int:
    from .commands.analyze import HELP, analyze
    from .run import open as open_run

    if not arguments or arguments[0] in ("-h", "--help"):
        print(HELP)
        return COMPLETE if arguments else ERROR
    have, failed = analyze(open_run(arguments[0]), arguments[1:])
    print(f"{have} cells have a value{f', {failed} analyses failed: outcomes named failed.* say why' * bool(failed)}")
    return FAILED_CELLS if failed else COMPLETE


def _capture(arguments: list[str]) -> int:
    from .commands import capture

    if not arguments or arguments[0] in ("-h", "--help"):
        print(capture.HELP)
        return COMPLETE if arguments else ERROR
    return capture.capture(arguments[0], arguments[1:])


def _show(arguments: list[str]) -> int:
    from .commands import show
    from .folder.blame import blaming
    from .run import open as open_run

    given = _parsed(arguments, "show", "Print one conversation.", "dir", "cell")
    run = open_run(given.dir)
    with blaming(run):
        print(show.text(run, run.find(given.cell)))
    return COMPLETE


def _verify(arguments: list[str]) -> int:
    from .folder.verify import reopen, verify

    given = _parsed(arguments, "verify", "Check a run folder against its commits.", "dir", "--deep", "--reopen")
    found = verify(given.dir, deep=given.deep)
    print("\n".join(found.lines))
    damaged = [*found.damaged, *(unit for inside in found.captures.values() for unit in inside.damaged)]
    if damaged and given.reopen:
        opened = reopen(given.dir, found)
        units = ", ".join(dict.fromkeys([*opened, *damaged]))
        print(f"reopened {units}: the command that started the run{_started(given.dir)} runs them again; "
              "`sweeps capture`, as it was given, captures of them again")  # fmt: skip
    elif damaged:
        print(f"restore these files from a copy, or let {_units(len(damaged))} and what stands on their trunks run again: "
              f"sweeps verify {given.dir} {'--deep ' * given.deep}--reopen, then the command of the run")  # fmt: skip
    return COMPLETE if found.ok else ERROR


def _started(root: str) -> str:
    """The command that last started a run, in brackets, where its events tell."""
    from .folder import status

    commands = [event["command"] for event in status.events(root) if event.get("command")]
    return f" ({commands[-1]})" if commands else ""


def _units(count: int) -> str:
    return f"{count} unit{'s' * (count != 1)}"


def _gc(arguments: list[str]) -> int:
    from .folder.garbage import collect

    given = _parsed(arguments, "gc", "Delete files that no commit names.", "dir", "--dry-run")
    deleted = collect(given.dir, dry_run=given.dry_run)
    print("\n".join([*deleted, f"{len(deleted)} files {'would be ' * given.dry_run}deleted"]))
    return COMPLETE


def _compare(arguments: list[str]) -> int:
    from .commands.compare import compare
    from .folder.blame import blaming
    from .run import Run

    given = _parsed(arguments, "compare", "The same cells in two runs.", "a", "b")
    a, b = Run(given.a), Run(given.b)
    with blaming(a, b):
        print("\n".join(compare(a, b).lines))
    return COMPLETE


def _export(arguments: list[str]) -> int:
    from .commands.export import command

    print(command(arguments))
    return COMPLETE


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "plan": _plan, "run": _run, "status": _status, "report": _report, "capture": _capture,
    "aggregate": _aggregate, "analyze": _analyze,
    "show": _show, "compare": _compare, "export": _export, "verify": _verify, "gc": _gc,
}  # fmt: skip
