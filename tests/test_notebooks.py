"""The notebooks run from an empty folder, and are stored without outputs."""

import json
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples" / "notebooks").glob("*.ipynb"))
SECONDS = 200  # of a cell; each takes a few on a quiet core
# What cells show: an output that contains this text.
SHOWN = {
    "arrays": ["best validation loss", "5,797 weights in total", "<polyline"],
    "plan_and_layout": ["2 micro-batches x 4 chunks", "equal to the unsplit step", "<td>finished after step 40</td>"],
    "table": ["num_outputs=24", "repeating the last day", "<polyline"],
}


def run(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Execute a notebook in a folder, which is its home too; return all outputs."""
    for variable in ("HOME", "IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(variable, str(folder / variable.lower()))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONWARNINGS", "error::UserWarning")
    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    client = NotebookClient(notebook, timeout=SECONDS, resources={"metadata": {"path": str(folder)}})
    client.execute()
    return "\n".join(text for cell in notebook.cells for output in cell.get("outputs", ()) for text in texts(output))


def texts(output: Any) -> list[str]:  # noqa: ANN401
    """The texts of a cell's output in all its forms."""
    return [output["text"]] if output["output_type"] == "stream" else [*map(str, output["data"].values())]


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.short] if path.stem == "arrays" else []) for path in NOTEBOOKS],
    ids=lambda path: path.stem,
)
@pytest.mark.long
def test_a_notebook_runs_and_shows_what_it_is_about(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = run(path, tmp_path, monkeypatch)
    assert [text for text in SHOWN[path.stem] if text not in printed] == [], printed


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs(path: Path) -> None:
    notebook = json.loads(path.read_text())
    for cell in notebook["cells"]:
        assert all("\n" not in line.rstrip("\n") for line in cell["source"]), "one line of source per entry"
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
