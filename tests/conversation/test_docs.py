"""The code blocks of docs/conversations.md run, in order."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "conversations.md"


@pytest.mark.slow
def test_the_page_runs(capsys):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 4
    names: dict = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    printed = capsys.readouterr().out
    assert "[3] bob:" in printed and "'alice': \"model 'smollm2'\"" in printed and printed.rstrip().endswith("True")
