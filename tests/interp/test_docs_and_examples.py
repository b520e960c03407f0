"""docs/interp.md runs, in order, as it stands there; the examples run and draw."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(command, folder):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MPLCONFIGDIR": str(folder)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_the_page_runs(tmp_path):
    text = (ROOT / "docs" / "interp.md").read_text()
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL))
    (tmp_path / "page.py").write_text(code)
    assert "router" not in run([sys.executable, "page.py"], tmp_path).splitlines()[0]


def test_the_page_shows_every_public_function():
    import interlens.interp as interp

    text = (ROOT / "docs" / "interp.md").read_text()
    functions = [name for name in interp.__all__ if name[0].islower() and callable(getattr(interp, name))]
    hidden = {"offload_to_cpu", "registered", "require_site", "sites_of", "unembed"}
    assert [name for name in functions if f"{name}" not in text and name not in hidden] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["causal_trace", "layer_sweep"])
def test_the_examples_run_and_draw(name, tmp_path):
    printed = run([sys.executable, str(ROOT / "examples" / f"{name}.py"), "--out", "picture.png"], tmp_path)
    assert "layer" in printed
    assert (tmp_path / "picture.png").read_bytes()[:4] == b"\x89PNG"
