"""Token ids that Ray Data, Spark and datatrove write to Parquet are read as they are."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from helpers.stores import rows_of
from stretto.data import SequenceOptions, prepare_sequences

SCRIPT = Path(__file__).parents[1] / "helpers" / "write_parquet.py"
TOKENS = [[row * step % 700 for step in range(1, row % 5 + 2)] for row in range(50)]


@pytest.mark.peers
@pytest.mark.parametrize(
    ("tool", "folders"),
    [
        ("ray", ["lists", "arrays", "ragged", "equal"]),
        ("spark", ["int", "long", "legacy"]),
        ("datatrove", ["documents"]),
    ],
)
def test_token_ids_of_other_tools_are_read_as_they_are(tool: str, folders: list[str], tmp_path: Path) -> None:
    python = os.environ.get("STRETTO_PARQUET_PYTHON")
    if python is None:
        pytest.skip("STRETTO_PARQUET_PYTHON does not name a Python that has ray[data], pyspark and datatrove")
    (tmp_path / "rows.json").write_text(
        json.dumps([{"id": row, "tokens": tokens} for row, tokens in enumerate(TOKENS)])
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([python, "-W", "ignore", SCRIPT, tool, tmp_path], check=True, timeout=200, env=environment)
    for folder in folders:
        files = sorted((tmp_path / folder).glob("*.parquet"))
        (sequences,) = prepare_sequences(files, tmp_path / "out" / folder, SequenceOptions(sequence="tokens"))
        expected = [[*tokens, 0, 0, 0][:4] if folder == "equal" else tokens for tokens in TOKENS]
        assert sorted(rows_of(sequences)) == sorted(expected), folder
