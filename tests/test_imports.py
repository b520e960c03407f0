"""Which way the arrows point: interlens knows nothing of sweeps or its tools, and each tool has one home."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOREIGN = {"ray", "hydra", "omegaconf", "pyarrow", "argparse", "click", "sweeps"}


def imported(path: Path) -> set[str]:
    """Absolute names of every module that a file imports, at any depth, for typing or for real."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            module = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return found


def files(folder: str) -> list[Path]:
    found = sorted((ROOT / folder).rglob("*.py"))
    assert found, f"no files in {folder}"
    return found


def test_relative_imports_are_read_right():
    names = imported(ROOT / "interlens" / "interp" / "select.py")
    assert "interlens.reasoning" in names and "numpy" in names


def test_interlens_knows_nothing_of_sweeps_and_its_tools():
    for path in files("interlens"):
        guilty = {name for name in imported(path) if name.split(".")[0] in FOREIGN}
        assert not guilty, f"{path.relative_to(ROOT)} imports {guilty}"


def test_interp_never_imports_the_engine():
    for path in files("interlens/interp"):
        guilty = {name for name in imported(path) if name.startswith("interlens.engine")}
        assert not guilty, f"{path.relative_to(ROOT)} imports {guilty}"


@pytest.mark.parametrize(("tool", "home"), [("ray", {"executors/ray.py"}), ("hydra", {"compose.py", "cli.py"})])
def test_a_tool_of_sweeps_has_one_home(tool, home):
    for path in files("sweeps"):
        if str(path.relative_to(ROOT / "sweeps")) not in home:
            guilty = {name for name in imported(path) if name.split(".")[0] == tool}
            assert not guilty, f"{path.relative_to(ROOT)} imports {guilty}"


def test_nothing_reaches_into_the_private_parts_of_ray():
    for folder in ("interlens", "sweeps", "tests", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            assert not {name for name in imported(path) if name.startswith("ray._private")}, path


@pytest.mark.parametrize("package", ["interlens", "sweeps"])
def test_importing_a_package_is_light(package):
    heavy = "{'torch', 'transformers', 'ray', 'hydra', 'pyarrow'}"
    code = f"import sys, {package}; print(sorted({heavy} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_every_public_name_can_be_had():
    import interlens
    import interlens.interp

    for package in (interlens, interlens.interp):
        for name in package.__all__:
            assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = interlens.nonsense
