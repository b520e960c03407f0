"""The language of `tokens:` in a configuration, read into `Select`.

    all | prompt | generated | reasoning | answer | branch | special
    window(0, 8, of=generated)   message(2)   positions(3, 4)

joined by `|` and `-`, with parentheses. It is parsed, never evaluated.
"""

from __future__ import annotations

import ast

from interlens.interp.select import Select

from ..errors import ConfigError

_NAMES = ("all", "prompt", "generated", "branch", "special")

_PHASES = ("reasoning", "answer")

_CALLS = ("window", "message", "positions", "phase")


def parse_tokens(text: str, where: str = "tokens") -> Select:
    """The selection that `text` names. ConfigError says what was given and what is possible."""
    try:
        return _read(ast.parse(str(text).strip(), mode="eval").body)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ConfigError(
            f"{where}: cannot read {text!r} ({reason}); possible: {', '.join((*_NAMES, *_PHASES))}, "
            "window(0, 8, of=generated), message(2), positions(3, 4), joined by | and -"
        ) from None


def _read(node: ast.expr) -> Select:
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitOr, ast.Sub)):
        left, right = _read(node.left), _read(node.right)
        return left | right if isinstance(node.op, ast.BitOr) else left - right
    if isinstance(node, ast.Name):
        return _named(node.id)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if not node.args and not node.keywords:
            return _named(node.func.id)
        if node.func.id not in (*_CALLS, "generated"):
            raise ValueError(f"{node.func.id} takes no arguments or does not exist")
        args = [_argument(a) for a in node.args]
        kwargs = {str(k.arg): _argument(k.value) for k in node.keywords}
        return getattr(Select, node.func.id)(*args, **kwargs)
    raise ValueError("neither a name nor a combination of them")


def _named(name: str) -> Select:
    if name in _PHASES:
        return Select.phase(name)
    if name in _NAMES:
        return getattr(Select, name)()
    raise ValueError(f"no selection {name!r}")


def _argument(node: ast.expr) -> int | str:
    if isinstance(node, ast.Name):
        return node.id
    value = ast.literal_eval(node)
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(f"{value!r} is neither a whole number nor a name")
    return value
