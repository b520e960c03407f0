"""What is shipped: a wheel that holds the configuration and the type markers, and works where no checkout is."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    return next(out.glob("*.whl"))


def test_the_wheel_holds_packages_configuration_and_type_markers(wheel):
    held = set(zipfile.ZipFile(wheel).namelist())
    conf = {f"sweeps/conf/{path.relative_to(ROOT / 'conf')}" for path in (ROOT / "conf").rglob("*.*")}
    code = {str(path.relative_to(ROOT)) for name in ("interlens", "sweeps") for path in (ROOT / name).rglob("*.py")}
    assert conf and conf | code | {"interlens/py.typed", "sweeps/py.typed"} <= held
    assert not [name for name in held if name.startswith(("tests", "benchmarks", "examples", "conf/"))]


def test_the_installed_wheel_runs_without_a_checkout(wheel, tmp_path):
    """Unpacked on a path of its own, in another working directory, the command finds its configuration."""
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    code = f"import sys; sys.path[:] = [{str(site)!r}] + [p for p in sys.path if {str(ROOT)!r} != p and p]; "
    code += "from sweeps.cli import main; sys.argv = ['sweeps', 'plan', 'experiment=enthusiasm']; sys.exit(main())"
    ran = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "cells" in ran.stdout


def test_pins_agree_with_the_ranges():
    """Every requirement of pyproject.toml admits exactly the version that constraints.txt pins."""
    import tomllib

    from packaging.requirements import Requirement
    from packaging.version import Version

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pins = {name.lower().replace("_", "-"): version for name, _, version in (line.partition("==") for line in lines)}
    assert all(pins.values()) and pins["torch"] == "2.13.0"
    extras = [text for extra in project["optional-dependencies"].values() for text in extra]
    for requirement in map(Requirement, [*project["dependencies"], *extras]):
        if requirement.name == project["name"]:
            continue
        assert requirement.specifier.contains(Version(pins[requirement.name.lower()])), requirement
