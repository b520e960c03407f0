"""The part of a `Run` that says what was found: results, directions, and their tables and charts in a notebook."""

from __future__ import annotations

import html
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .places import Remote

if TYPE_CHECKING:
    from torch import Tensor


class Shown(str):
    """A small page of HTML. Jupyter shows it in a frame, so that its style stays inside."""

    def _repr_html_(self) -> str:
        return f'<iframe srcdoc="{html.escape(self)}" style="width:100%;height:34rem;border:0"></iframe>'


class Results:
    """Base of `Run`."""

    root: Path | Remote

    def results(self) -> dict[str, dict[str, Any]]:
        """Name -> result of every aggregate that has been finished, as in `aggregates/<name>.json`."""
        from .aggregates.results import read_results

        return read_results(self.root)

    def directions(self, name: str = "directions") -> dict[str, Tensor]:
        """Tensor name (`residual.16`) -> direction [D] float32 of unit norm, of one aggregate. KeyError: it has none."""
        import torch

        from .aggregates.directions import read_directions

        file = self.root / f"aggregates/{name}.safetensors"
        if not file.is_file():
            found = sorted((self.root / "aggregates").glob("*.safetensors"))
            known = ", ".join(path.stem for path in found if not path.stem.endswith(".arrays")) or "none"
            raise KeyError(f"no directions of {name!r} here; there are: {known}")
        return {key: torch.from_numpy(value) for key, value in read_directions(file)[0].items()}

    def plot(self, name: str) -> Shown:
        """The tables and charts of one aggregate, as the report has them; Jupyter shows them. KeyError: no result."""
        from .report.page import section

        results = self.results()
        if name not in results:
            raise KeyError(f"no result {name!r} here; there are: {', '.join(results) or 'none'}")
        return Shown(section(results[name]))

    def _repr_html_(self) -> str:
        from .report.page import overview

        return str(overview(self))
