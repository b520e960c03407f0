"""Laws of `compare` and `export`."""

import numpy as np
import pyarrow.parquet as pq
import pytest

import sweeps
from sweeps.cli import main
from sweeps.commands.compare import compare
from sweeps.commands.export import export
from sweeps.driver import enter
from sweeps.errors import ConfigError
from sweeps.folder.writer import UnitWriter
from sweeps.plan.expand import expand
from tests.support import talk


def run_of(tmp_path, name, change=lambda number, message: None, seed=0, **options):
    """Cells without trunks before them."""
    alone = {**talk.SCENARIO, "seed": seed, "trunk": {"turns": 0, "seeds": 2}}
    config = talk.config(tmp_path, scenario=alone, run={"dir": str(tmp_path / name)}, **options)
    enter.enter(config, config.run.dir)
    number = 0
    for unit in expand(config):
        writer = UnitWriter(config.run.dir, unit, {"alice": "tiny", "bob": "tiny"})
        for cell in unit.cells:
            message = talk.said("bob", "so", 1)
            change(number, message)
            writer.add_cell(cell, [message], talk.records(0, float(number)))
            number += 1
        writer.commit()
    return sweeps.open(config.run.dir)


def test_a_run_equals_itself(tmp_path):
    run = run_of(tmp_path, "a")
    found = compare(run, run)
    assert (found.matched, found.same_cells, found.same_replies, found.only) == (24, 24, 24, (0, 0))
    assert found.logprob_changes == [0.0] * 24 * 5 and not found.first_differences


def test_differences_are_found_across_ids(tmp_path):
    from dataclasses import replace

    def change(number, message):
        message.metadata["logprobs"] = [x + 0.5 for x in message.metadata["logprobs"]]
        if number % 2:
            message.fed = replace(message.fed, generated=(11, 12, 99, 14, 15))

    a = run_of(tmp_path, "a")
    b = run_of(tmp_path, "b", change, seed=9)
    assert not set(a.cells["cell"].to_pylist()) & set(b.cells["cell"].to_pylist())
    found = compare(a, b)
    assert (found.matched, found.same_replies) == (24, 12) and found.first_differences == [2] * 12
    assert len(found.logprob_changes) == 12 * 5 + 12 * 2 and np.allclose(found.logprob_changes, -0.5)
    assert "12 of 24 replies" in "\n".join(found.lines)


def test_an_ambiguous_match_is_refused(tmp_path):
    a = run_of(tmp_path, "a")
    b = run_of(tmp_path, "b", grid={"framing": {"warm": "w", "cold": "c"}, "scenario.branch.temperature": [0.1, 0.2]})
    with pytest.raises(ConfigError, match=r"only it has the axes: scenario\.branch\.temperature"):
        compare(a, b)


def test_exported_vectors_are_the_runs(tmp_path, capsys):
    run = run_of(tmp_path, "a")
    assert export(run, tmp_path / "x.parquet", ["layer=3", "framing=warm"]) == (12, 8)
    table = pq.read_table(tmp_path / "x.parquet")
    x, rows = run.vectors(layer=3)
    warm = np.array(rows["framing"].to_pylist()) == "warm"
    assert np.array_equal(np.stack(table["vector"].to_numpy()), x[warm])
    assert table["cell"].to_pylist() == [c for c, kept in zip(rows["cell"].to_pylist(), warm, strict=True) if kept]
    assert main(["export", str(run.root), str(tmp_path / "x.npz"), "layer=[1, 3]", "item=i1"]) == 0
    assert "16 vectors of 8 values" in capsys.readouterr().out
    with np.load(tmp_path / "x.npz", allow_pickle=False) as found:
        assert found["vectors"].shape == (16, 8) and set(found["layer"]) == {1, 3} and set(found["item"]) == {"i1"}
    assert main(["compare", str(run.root), str(run.root)]) == 0


def test_export_takes_expressions_layers_and_a_format(tmp_path, capsys):
    run = run_of(tmp_path, "a")
    asked = ["--layers", "1,3", "--where", "framing == 'warm' and message.author == 'bob'", "--format", "npz"]
    assert main(["export", str(run.root), str(tmp_path / "x.bin"), "item=i1", *asked]) == 0
    assert "8 vectors of 8 values" in capsys.readouterr().out
    with np.load(tmp_path / "x.bin") as found:
        assert set(found["framing"]) == {"warm"} and set(found["layer"]) == {1, 3} and set(found["item"]) == {"i1"}
    for wrong, complaint in (
        (["--where", "frame == 'warm'"], "--where: no column 'frame'"), (["--where", "framing =="], "--where: "),
        (["--layers", "one"], "--layers: cannot read 'one'"), (["--format", "csv"], "invalid choice"),
    ):  # fmt: skip
        assert main(["export", str(run.root), str(tmp_path / "y.npz"), *wrong]) == 1
        error = capsys.readouterr().err
        assert complaint in error and not (tmp_path / "y.npz").exists()


def test_directions_are_exported_as_a_control_vector(tmp_path, capsys):
    from gguf import GGUFReader

    from sweeps.aggregates.results import finalize
    from sweeps.config.schema import AggregateConfig

    run = run_of(tmp_path, "a")
    assert main(["export", str(run.root), str(tmp_path / "v.gguf")]) == 1
    assert "no directions of 'directions' here; there are: none" in capsys.readouterr().err
    options = {"contrast": "framing == 'warm' vs framing == 'cold'", "permutations": 0, "draws": 20}
    finalize(run, [AggregateConfig(name="directions", options=options)])
    assert main(["export", str(run.root), str(tmp_path / "v.gguf"), "--hint", "llama", "--layers", "3"]) == 0
    assert "1 directions of 8 values" in capsys.readouterr().out
    (tensor,) = GGUFReader(str(tmp_path / "v.gguf")).tensors
    assert tensor.name == "direction.3" and np.allclose(tensor.data, run.directions()["residual.3"], atol=1e-6)
    assert main(["export", str(run.root), str(tmp_path / "w.gguf"), "--layers", "2"]) == 1
    assert "no residual.2 in 'directions'; it has: residual.1, residual.3" in capsys.readouterr().err
    shown = run.plot("directions")._repr_html_()
    assert shown.startswith("<iframe srcdoc=") and "Held-out AUROC" in shown and "24 done" in run._repr_html_()
    with pytest.raises(KeyError, match="no result 'lda' here; there are: directions"):
        run.plot("lda")


@pytest.mark.parametrize(("out", "conditions", "said"), [
    ("x.csv", [], "possible endings: .parquet, .npz"), ("x.npz", ["layr=3"], "did you mean 'layer'"),
    ("x.npz", ["layer=7"], "nothing matches"), ("x.npz", ["layer"], "write key=value"),
])  # fmt: skip
def test_what_cannot_be_exported_is_refused_and_writes_nothing(tmp_path, out, conditions, said):
    run = run_of(tmp_path, "a")
    with pytest.raises(ConfigError, match=said):
        export(run, tmp_path / out, conditions)
    assert not list(tmp_path.glob("*x.*"))
