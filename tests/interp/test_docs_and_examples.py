"""docs/interp.md runs, in order, as it stands there; the examples run and draw."""

import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs a script in an empty folder, in this process; what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path))

    def run(path, *arguments):
        monkeypatch.setattr(sys, "argv", [str(path), *arguments])
        runpy.run_path(str(path), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.mark.slow
def test_the_page_runs(tmp_path, run):
    text = (ROOT / "docs" / "interp.md").read_text()
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL))
    (tmp_path / "page.py").write_text(code)
    assert "router" not in run(tmp_path / "page.py").splitlines()[0]


def test_the_page_shows_every_public_function():
    import interlens.interp as interp

    text = (ROOT / "docs" / "interp.md").read_text()
    functions = [name for name in interp.__all__ if name[0].islower() and callable(getattr(interp, name))]
    hidden = {"offload_to_cpu", "registered", "require_site", "sites_of", "unembed"}
    assert [name for name in functions if f"{name}" not in text and name not in hidden] == []


@pytest.mark.slow
@pytest.mark.parametrize(("name", "more"), [("causal_trace", ("--every", "3")), ("layer_sweep", ())])
def test_the_examples_run_and_draw(name, more, tmp_path, run):
    printed = run(ROOT / "examples" / f"{name}.py", "--out", "picture.png", *more)
    assert "layer" in printed
    assert (tmp_path / "picture.png").read_bytes()[:4] == b"\x89PNG"
