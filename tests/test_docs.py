"""The pages under docs/ are true to the tree they describe: their links lead somewhere, the files they name exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*(ROOT / "docs").glob("*.md"), *ROOT.glob("*/README.md"), ROOT / "CONTRIBUTING.md"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paths_lead_somewhere(page):
    text = page.read_text()
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        assert "://" in link or (page.parent / link).exists(), f"{page.name} links to {link}"
    for path in re.findall(r"`((?:interlens|sweeps|conf|tests|docs|benchmarks|examples)/[\w./]*)`", text):
        assert (ROOT / path).exists(), f"{page.name} names {path}"


def test_the_index_of_examples_names_each_of_them():
    index = (ROOT / "examples" / "README.md").read_text()
    assert [path.name for path in (ROOT / "examples").glob("*.py") if f"({path.name})" not in index] == []


def test_design_names_only_what_is_there():
    """The table of where things are: every word in its first column is a module or a folder."""
    text = (ROOT / "docs" / "design.md").read_text()
    rows = re.findall(r"^\| `([^`]*)`", text, flags=re.MULTILINE)
    names = {
        name.strip().rstrip("/") for row in rows for name in re.split(r"[,\s]+", row) if name not in ("", "sweeps/")
    }
    for name in names:
        found = [*ROOT.glob(f"interlens/{name}.py"), *ROOT.glob(f"interlens/{name}"), *ROOT.glob(f"sweeps/{name}*")]
        assert found, f"docs/design.md names {name}"


def test_the_product_stands_alone():
    """Nothing in the repository points at a folder that a user does not have."""
    folders = ("interlens", "sweeps", "conf", "docs", "cluster", "examples", "benchmarks", ".ci")
    pages = [page for folder in folders for page in (ROOT / folder).rglob("*.*") if page.suffix != ".pyc"]
    pages += [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile", ROOT / "pyproject.toml"]
    for page in pages:
        assert "../shared" not in page.read_text(errors="ignore"), page
