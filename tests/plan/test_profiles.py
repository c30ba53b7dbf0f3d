"""Profiles written by hand: a mistake is rejected with one sentence."""

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.profiles import kind, profile
from stretto.errors import PlanError
from stretto.plan import load_profile

POINT = {"rows": 1, "steps": 1, "forward": 0, "backward": 0, "saved": 0}


def change(values: dict[str, Any], path: str, value: object) -> None:
    *outer, last = path.split(".")
    inner: Any = values
    for name in outer:
        inner = inner[int(name)] if isinstance(inner, list) else inner[name]
    inner[last] = value


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ("intra_node.latency", float("inf"), "intra_node.latency"),
        ("intra_node.bandwidth", 0, "intra_node.bandwidth"),
        ("kinds.0.points.0.forward", float("nan"), "kinds.0.points.0.forward"),
        ("kinds.0.points.0.forward", 1e308, "kinds.0.points.0.forward"),
        ("kinds.0.weight_bytes", 10**400, "kinds.0.weight_bytes"),
        ("kinds.0.points.0.rows", 8, "exactly one for each of "),
        ("kinds.0.fused_points", [POINT, POINT], "fused_points has 2 entries; it needs exactly one for each of "),
        ("fused_blocks", [1], "fused_blocks has 1, which is not the index of a block after another"),
        ("speeds", [{"ranks": 1, "contended": 5e-324, "solo": 1}], "speeds.0.contended"),
        ("blocks", ["0", "7"], "blocks has '7', which is not one of kinds"),
        ("blocks", [], "blocks"),
        ("memory", 0, "memory"),
        ("colour", "red", "colour"),
        ("kinds.0.points", [POINT], "takes any time"),
    ],
)
def test_a_value_out_of_range_is_rejected_in_one_sentence(
    path: str, value: object, sentence: str, tmp_path: Path
) -> None:
    values = json.loads(profile([kind()]).model_dump_json())
    change(values, path, value)
    (tmp_path / "bad.json").write_text(json.dumps(values))
    with pytest.raises(PlanError, match="is not a valid profile") as error:
        load_profile(tmp_path / "bad.json")
    assert sentence in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[1]", b"null"])
def test_a_file_that_is_not_a_profile_is_rejected(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_bytes(content)
    with pytest.raises(PlanError, match=r"bad\.json is not a valid profile"):
        load_profile(tmp_path / "bad.json")
    with pytest.raises(PlanError, match="can't be read"):
        load_profile(tmp_path / "nowhere.json")
