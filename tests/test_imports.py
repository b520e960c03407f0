"""Which way the arrows point: interlens knows nothing of sweeps or its tools, and each tool has one home."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = {
    "interlens": (
        "errors given sources reasoning written call calls templating visibility",
        "moments statistics fitting probes",
        "interp/",
        "adapter_checks adapter_config upcycle preview dequantise adapters loading",
        "engine/",
        "message encoding transcript saving tools",
        "views/",
        "studies/",
        "work read_only scheduler",
        "policies/ participants/",
        "capturing seeing turns rollout state conversation",
    ),
    "sweeps": (
        "errors redact failpoints analyzers",
        "config/",
        "folder/",
        "plan/",
        "aggregates/",
        "report/ replica/",
        "driver/",
        "run typed compose",
        "commands/",
        "cli",
    ),
}
"""Package -> its files and folders, low to high. A file imports what is in its own layer or in lower ones."""
INSIDE = {
    "interlens/participants/weights.py": "a saved conversation is read, and its needs told, without what loads weights",
    "interlens/preview.py": "what a model's name means is told without torch",
    "sweeps/run.py": "Ray is loaded where a Ray Dataset is asked for",
    "sweeps/driver/executors/pool.py": "a run in this process never loads Ray",
    "sweeps/commands/aggregate.py": "Ray is loaded where replicas are asked for",
}
"""Files beside cli.py and __init__.py that import their own package inside functions, and why."""
FOREIGN = {"ray", "hydra", "omegaconf", "pyarrow", "argparse", "click", "sweeps"}


def modules_of(path: Path, node: ast.stmt) -> list[tuple[str, str]]:
    """(module, name or "") in absolute terms, of each name that an import statement brings in; [] for another node."""
    if isinstance(node, ast.Import):
        return [(alias.name, "") for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    base = [*package[: len(package) - node.level + 1]] if node.level else []
    module = ".".join([*base, *(node.module or "").split(".")]).strip(".")
    return [(module, alias.name) for alias in node.names]


def imported(path: Path) -> set[str]:
    """Absolute names of every module that a file imports, at any depth, for typing or for real."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        for module, name in modules_of(path, node):
            found |= {module, *([f"{module}.{name}"] if name else [])}
    return found


def files(folder: str) -> list[Path]:
    found = sorted((ROOT / folder).rglob("*.py"))
    assert found, f"no files in {folder}"
    return found


def own_imports(package: str, inside: bool = False) -> dict[str, set[str]]:
    """File -> files of its package that it imports, at any depth, for typing too; `inside`: only those in functions."""
    known = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in files(package)
    }
    found = {}
    for path in files(package):
        tree = ast.parse(path.read_text())
        roots = [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.Lambda))] if inside else [tree]
        pairs = [pair for root in roots for node in ast.walk(root) for pair in modules_of(path, node)]
        targets = {known.get(f"{module}.{name}") or known.get(module) for module, name in pairs} - {None, path}
        found[str(path.relative_to(ROOT))] = {str(target.relative_to(ROOT)) for target in targets}
    return found


@pytest.mark.parametrize("package", LAYERS)
def test_imports_point_to_the_same_or_a_lower_layer(package):
    rank = {name.rstrip("/"): n for n, row in enumerate(LAYERS[package]) for name in row.split()}
    rank |= {"__init__": len(rank), "__main__": len(rank)}
    layer = {path: rank.get(path.split("/")[1].removesuffix(".py")) for path in own_imports(package)}
    assert [path for path, n in layer.items() if n is None] == [], "give these a layer"
    for path, targets in own_imports(package).items():
        upwards = [target for target in targets if layer[target] > layer[path]]
        assert not upwards, f"{path} imports {upwards}, which are above it"


@pytest.mark.parametrize("package", LAYERS)
def test_no_files_import_each_other_in_a_circle(package):
    left = own_imports(package)
    while free := [path for path, targets in left.items() if not targets & left.keys()]:
        for path in free:
            del left[path]
    assert not left, f"among these is a circle: {', '.join(left)}"


@pytest.mark.parametrize("package", LAYERS)
def test_a_package_imports_itself_at_the_top_of_its_files(package):
    for path, targets in own_imports(package, inside=True).items():
        allowed = path.endswith(("/cli.py", "/__init__.py")) or path in INSIDE
        assert allowed or not targets, f"{path} imports {targets} inside functions; put it at the top, or say why here"
        assert targets or path not in INSIDE, f"{path} imports nothing inside functions any more"
    assert len(INSIDE) <= 10


def test_the_report_and_replicas_know_nothing_of_each_other():
    for one, other in (("report", "replica"), ("replica", "report")):
        for path in files(f"sweeps/{one}"):
            assert not {name for name in imported(path) if name.startswith(f"sweeps.{other}")}, path


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


@pytest.mark.parametrize(
    ("tool", "home"),
    [
        ("ray", {"driver/executors/ray.py", "driver/executors/ray_tasks.py"}),
        ("hydra", {"compose.py", "typed.py", "cli.py"}),
    ],
)
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
