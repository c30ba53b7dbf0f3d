"""What may change between two starts of a run, and what may not."""

import json
import os
import re
import shutil
import tempfile
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto import Run
from stretto.base.log_segments import list_segments
from stretto.base.position import Position
from stretto.config.run import RunConfig
from stretto.config.toml import parse_config
from stretto.data import Corpus
from stretto.errors import ConfigError, DataError
from stretto.train import log as run_log
from stretto.train.config_changes import find_changes
from stretto.train.log import LogWriter, has_line, open_log
from stretto.train.start import prepare_run


def config_for(corpus: Corpus, folder: Path, changes: dict[str, object] | None = None) -> RunConfig:
    tree: dict[str, dict[str, object]] = {
        "data": {"train": corpus.location, "lanes": 8, "window": 20},
        "model": {"hidden": 12},
        "train": {"steps": 4},
        "run": {"folder": folder},
    }
    for name, value in (changes or {}).items():
        section, field = name.split(".")
        tree.setdefault(section, {})[field] = value
    return parse_config(tree)


@pytest.mark.parametrize(
    ("field", "value", "before"),
    [
        ("model.hidden", 16, "12"),
        ("model.cell", "gru", "lstm"),
        ("data.lanes", 4, "8"),
        ("data.window", 10, "20"),
        ("train.optimizer", "sgd", "adamw"),
        ("train.options", {"amsgrad": True}, "{}"),
        ("run.seed", 2, "1"),
    ],
)
def test_an_incompatible_change_is_refused(
    field: str, value: object, before: str, byte_corpus: Corpus, tmp_path: Path
) -> None:
    list(Run(config_for(byte_corpus, tmp_path)).events())
    message = f"{re.escape(f'{field}={value}')}, but .* was saved with {field}={re.escape(before)}; set it back"
    with pytest.raises(ConfigError, match=message):
        Run(config_for(byte_corpus, tmp_path, {field: value, "train.steps": 8}))


def test_different_data_is_refused_and_a_moved_copy_is_not(
    byte_corpus: Corpus, word_corpus: Corpus, tmp_path: Path
) -> None:
    list(Run(config_for(byte_corpus, tmp_path / "run")).events())
    with pytest.raises(ConfigError, match=r"is not the data that .* was saved with"):
        Run(config_for(word_corpus, tmp_path / "run"))
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in Path(byte_corpus.location).iterdir():
        (moved / path.name).write_bytes(path.read_bytes())
    run = Run(config_for(byte_corpus, tmp_path / "run", {"data.train": str(moved), "train.steps": 5}))
    assert [str(change) for change in run.changes] == [
        f"data.train {byte_corpus.location} -> {moved}",
        "train.steps 4 -> 5",
    ]


def test_the_changed_fields_are_shown(byte_corpus: Corpus, tmp_path: Path) -> None:
    before = config_for(byte_corpus, tmp_path).model_dump(mode="json")
    now = config_for(byte_corpus, tmp_path / "elsewhere", {"train.lr": 0.5, "layout.stages": 2, "save.every": 3})
    assert [str(change) for change in find_changes(before, now)] == [
        "train.lr 0.001 -> 0.5",
        "layout.stages 1 -> 2",
        "save.every none -> 3",
    ]
    # A field that a later version has added was at its default.
    del before["save"], before["train"]["nonfinite"]
    assert len(find_changes(before, now)) == 3


def test_only_the_first_rank_looks_at_the_runs_folder_its_checkpoints_and_all_files(
    byte_corpus: Corpus, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    shutil.copytree(byte_corpus.location, data)
    config = config_for(byte_corpus, tmp_path / "run", {"data.train": str(data)})
    manifest = tmp_path / "run" / "checkpoints" / "step-000000001-g1" / "manifest.json"
    for path in (manifest, tmp_path / "run" / "checkpoints" / "generations" / "000000001.json"):
        path.parent.mkdir(parents=True)
        path.write_text("damaged")
    with pytest.raises(DataError, match="is damaged"):
        prepare_run(config)
    manifest.unlink()
    shard = next(data.glob("tokens-*.bin"))
    os.truncate(shard, shard.stat().st_size - 1)
    with pytest.raises(DataError, match=f"{shard.name} has "):
        prepare_run(config)
    manifest.write_text("damaged")
    windows = prepare_run(config, is_first_rank=False).train.windows
    # What it has not looked at, it notices when it reads it.
    with pytest.raises(DataError, match=f"{shard.name} has "):
        windows.read(Position(0, 0, 0))


def test_a_log_continues_after_the_saved_step(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with open_log(path, 0) as log:
        for step in range(1, 8):
            LogWriter(log).write("step", {"step": step, "loss": float("nan")})
        # One that was cut off still writes, and nobody reads it.
        with open_log(path, 4) as other:
            LogWriter(log).write("step", {"step": 8})
            LogWriter(other).write("step", {"step": 5})
    with path.open("a") as torn:
        torn.write('{"kind": "step", "st')
    with open_log(path, 5):
        pass
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4, 5]


@given(
    st.lists(st.sampled_from(["step", "save", "evaluation", "start"]), max_size=60),
    st.integers(0, 20), st.integers(1, 200),
)  # fmt: skip
def test_reading_a_logs_end_gives_what_reading_all_of_it_gives(kinds: list[str], resumed: int, block: int) -> None:
    """A save may be logged steps later, so lines of earlier steps come after those of later ones."""
    step, lines = 0, []
    for number, kind in enumerate(kinds):
        step += kind == "step"
        line_step = max(0, step - number % 3) if kind == "save" else step
        lines.append(json.dumps({"kind": kind, "step": line_step, "note": "x" * (number * 7 % 50)}) + "\n")
    expected = [line for line in lines if json.loads(line)["step"] <= resumed]
    is_evaluated = any(
        json.loads(line)["kind"] == "evaluation" and json.loads(line)["step"] == resumed for line in lines
    )
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_log, "_BLOCK_BYTES", block)
        path = Path(folder) / "log.jsonl"
        path.write_text("".join(lines) + '{"kind": "step", "st')
        assert has_line(path, "evaluation", resumed) == is_evaluated
        open_log(path, resumed).close()
        assert path.read_text() == "".join(expected)


def test_of_a_long_log_only_the_end_is_parsed_and_an_earlier_launch_no_longer_writes_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log.jsonl"
    with path.open("w") as file:
        file.writelines(json.dumps({"kind": "step", "step": step}) + "\n" for step in range(50_000))
    num_parsed = 0
    parse = run_log._parse

    def count(line: bytes) -> tuple[str, float]:
        nonlocal num_parsed
        num_parsed += 1
        return parse(line)

    monkeypatch.setattr(run_log, "_parse", count)
    with path.open("a", buffering=1) as earlier:
        writer = LogWriter(earlier)
        assert not has_line(path, "evaluation", 49_990)
        with open_log(path, 49_990) as now:
            writer.write("step", {"step": 50_000, "note": "from an earlier launch " * 20})
            LogWriter(now).write("step", {"step": 49_991})
            writer.write("step", {"step": 50_001})
    assert num_parsed < 40
    assert [json.loads(line)["step"] for line in path.read_bytes().splitlines()] == list(range(49_992))


def test_a_damaged_line_in_the_middle_of_a_log_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"kind": "step", "step": 1}\n{"kind": "st\n7\n\n{"kind": "step", "step": 2}\n')
    lines = list(run_log.read_lines(list_segments(path)))
    assert lines == [("step", {"step": 1}), ("step", {"step": 2})]


def test_a_long_log_is_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with path.open("w") as log:
        for step in range(30_000):
            log.write(json.dumps({"kind": "step", "step": step, "note": "x" * 200}) + "\n")
        log.write('{"kind": "evaluation", "step": 29999, "loss": 1.0}\n{"kind": "step", "st')
    tracemalloc.start()
    try:
        assert has_line(path, "evaluation", 29_999) and not has_line(path, "evaluation", 29_998)
        with open_log(path, 29_999):
            pass
        assert tracemalloc.get_traced_memory()[1] < 1e6 < path.stat().st_size / 5
    finally:
        tracemalloc.stop()
    assert path.read_bytes().count(b"\n") == 30_001
