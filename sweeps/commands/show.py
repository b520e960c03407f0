"""One conversation as text."""

from __future__ import annotations

from ..run import Run


def text(run: Run, cell: str) -> str:
    """A cell's conversation: what it is, then each message, the branch point marked. Of one that failed: why."""
    row = run.plan_row(cell)
    axes = ", ".join(f"{name}={row[name]}" for name in run.axes if row[name] is not None)
    lines = [
        f"cell {cell}  item {row['item']}  trunk {row['trunk']}  seeds {row['trunk_seed']}, {row['branch_seed']}",
        f"condition: {axes or 'none'}",
        "",
    ]
    if row["state"] != "done":
        return "\n".join([*lines, *_unfinished(run, cell, row["state"])])
    shared = run.num_trunk_messages(cell)
    for index, message in enumerate(run.messages(cell)):
        if index == shared and index:
            lines.append("--- branch ---")
        reason = message.metadata.get("finish_reason")
        lines.append(
            f"[{index}] {message.author}{'' if reason in (None, 'stop') else f' ({reason})'}: {message.content}"
        )
    return "\n".join(lines)


def _unfinished(run: Run, cell: str, state: str) -> list[str]:
    failures = [row for row in run.table("failures").to_pylist() if row["cell"] == cell]
    if not failures:
        return [f"{state}; it has no messages yet"]
    last = failures[-1]
    return [f"failed after {last['attempts']} attempts: {last['error']}", "", *(last["traceback"] or "").splitlines()]
