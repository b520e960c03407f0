"""README is true: its commands and its code run, in order, as they stand there."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import apart

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str | None = None) -> list[tuple[str, str]]:
    """(language, text) of the fenced blocks, in order."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
    return [block for block in found if language is None or block[0] == language]


def test_something_that_runs_stands_on_the_first_screen():
    first = README.splitlines()[:20]
    assert "make demo" in "\n".join(first) and "make test" in "\n".join(first) and "```python" in first
    assert len(blocks("python")[0][1].splitlines()) < 20


@pytest.mark.parametrize("target", re.findall(r"^make (\w+)", README, flags=re.MULTILINE))
def test_its_make_targets_exist(target):
    ran = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_its_links_lead_somewhere():
    links = [link for link in re.findall(r"\]\(([^)#]+)", README) if "://" not in link]
    assert links
    for link in links:
        assert (ROOT / link).exists(), link


@pytest.mark.slow
def test_its_commands_and_code_run_in_order(tmp_path):
    """Each in a process of its own, forked from one that has imported the package."""
    count = 0
    for language, text in blocks():
        if language == "python":
            ran = [(code, text)]
        elif language == "bash":
            commands = [shlex.split(line, comments=True) for line in text.splitlines()]
            ran = [(sweeps_command, command[1:]) for command in commands if command and command[0] == "sweeps"]
        else:
            ran = []
        for function, given in ran:
            assert apart.wait(apart.start(within, tmp_path, function, given), 300) == 0, given
            count += 1
    assert count >= 5
    assert (tmp_path / "runs" / "small" / "report" / "index.html").is_file()


def within(folder, function, given):
    os.chdir(folder)
    return function(given)


def code(text):
    exec(compile(text, "README.md", "exec"), {"__name__": "__main__"})


def sweeps_command(arguments):
    from sweeps.cli import main

    sys.argv = ["sweeps", *arguments]
    return main(arguments)
