"""A long log is continued in a new file, without reading or copying it, and is read as if it were one file."""

import errno
import json
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto import Run
from stretto.base.log_segments import add_segment, header_line, list_segments, segment_lines, segment_path
from stretto.config.run import RunConfig
from stretto.config.toml import parse_config
from stretto.data import Corpus
from stretto.report.record_reader import read_record
from stretto.train import log as run_log
from stretto.train.log import LogWriter, has_line, open_log, read_lines


def steps_of(log: Path) -> list[int]:
    return [values["step"] for kind, values in read_lines(list_segments(log)) if kind == "step"]  # type: ignore[misc]


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 6)), min_size=1, max_size=8), st.integers(0, 300))
def test_launches_that_continue_a_log_give_the_lines_of_one_file(launches: list[tuple[int, int]], limit: int) -> None:
    """Each launch runs some steps, and the next one repeats the last of them; some lines come a step late."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_log, "_MAX_COPIED_BYTES", limit)
        patch.setattr(run_log, "_BLOCK_BYTES", 50)
        log, expected, step = Path(folder, "log.jsonl"), list[tuple[str, int]](), 0
        for num_steps, num_repeated in launches:
            step = max(0, step - num_repeated)
            expected = [line for line in expected if line[1] <= step]
            assert has_line(log, "evaluation", step) == (("evaluation", step) in expected)
            with open_log(log, step) as file:
                for _ in range(num_steps):
                    step += 1
                    lines = [("step", step), ("save", step - 1), *([("evaluation", step)] if step % 2 else [])]
                    for kind, line_step in lines:
                        LogWriter(file).write(kind, {"step": line_step})
                    expected += lines
        segments = list_segments(log)
        assert [(kind, values["step"]) for kind, values in read_lines(segments)] == expected
        record = read_record(folder)
        assert record.steps.last_step == step and not record.num_unreadable_lines
        # As for `cat log-*.jsonl log.jsonl`, apart from the headers.
        files = [*sorted(Path(folder).glob("log-*.jsonl")), log]
        lines_of_files = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        assert [(line["kind"], line["step"]) for line in lines_of_files if line["kind"] != "continues"] == expected
        assert len(files) == len(segments)


def test_an_earlier_launch_writes_to_the_end_of_a_segment_that_nobody_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_log, "_MAX_COPIED_BYTES", 100)
    log = tmp_path / "log.jsonl"
    with open_log(log, 0) as earlier:
        for step in range(1, 20):
            LogWriter(earlier).write("step", {"step": step})
        with open_log(log, 10) as now:
            for step in range(20, 25):
                LogWriter(earlier).write("step", {"step": step})
                LogWriter(now).write("step", {"step": step - 9})
        assert segment_path(log, 1).read_text().count("\n") > 10
        assert steps_of(log) == [*range(1, 16)] and read_record(tmp_path).steps.last_step == 15
    # The launch after it continues the right lines.
    open_log(log, 12).close()
    assert steps_of(log) == [*range(1, 13)]


def test_a_launch_removes_only_segments_of_the_log_that_it_replaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_log, "_MAX_COPIED_BYTES", 100)
    log = tmp_path / "log.jsonl"
    others = {"log-20261117.jsonl", "log-00007.jsonl", "log-1.jsonl"}
    for name in others:
        (tmp_path / name).write_text("of somebody else\n")
    for first_step in (0, 20, 40):
        with open_log(log, first_step) as file:
            for step in range(first_step + 1, first_step + 21):
                LogWriter(file).write("step", {"step": step})
    segments = {"log-00008.jsonl", "log-00009.jsonl"}
    assert {path.name for path in tmp_path.iterdir()} == {*others, *segments, "log.jsonl"}
    assert steps_of(log) == [*range(1, 61)]
    open_log(log, 0).close()
    assert {path.name for path in tmp_path.iterdir()} == {*others, "log.jsonl"} and not steps_of(log)
    assert all((tmp_path / name).read_text() == "of somebody else\n" for name in others)


def test_a_segment_of_a_launch_that_was_killed_before_it_replaced_the_log_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_log, "_MAX_COPIED_BYTES", 100)
    log = tmp_path / "log.jsonl"
    log.write_text("".join(f'{{"kind": "step", "step": {step}}}\n' for step in range(1, 20)))
    assert add_segment(log) == 1
    open_log(log, 15).close()
    assert {path.name for path in tmp_path.iterdir()} == {"log-00001.jsonl", "log.jsonl"}
    assert steps_of(log) == [*range(1, 16)]


def test_the_report_and_a_restart_say_that_the_beginning_of_a_log_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run_log, "_MAX_COPIED_BYTES", 100)
    log = tmp_path / "log.jsonl"
    for first_step in (0, 20):
        with open_log(log, first_step) as file:
            for step in range(first_step + 1, first_step + 21):
                LogWriter(file).write("step", {"step": step})
    segment = segment_path(log, 1).rename(tmp_path / "elsewhere")
    for _ in range(2):
        record = read_record(tmp_path)
        assert record.num_unreadable_lines == 1 and record.steps.last_step == 40
        caplog.clear()
        open_log(log, 40).close()
        assert "log.jsonl is in log-00001.jsonl, which is missing; put it back" in caplog.text
        assert not has_line(log, "evaluation", 40) and steps_of(log) == [*range(20, 41)]
        if not segment_path(log, 1).is_symlink():
            segment_path(log, 1).symlink_to(segment)
    # A file that was put back is read again.
    segment.replace(segment_path(log, 1))
    assert steps_of(log) == [*range(1, 41)] and not read_record(tmp_path).num_unreadable_lines


def test_a_header_that_names_no_earlier_segment_ends_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    line = b'{"kind": "step", "step": 1}\n'
    for number in (0, -1, 7, 10**12):
        log.write_bytes(header_line(number, 100, 0) + line)
        assert steps_of(log) == [1]
    # A segment that names itself, and one that is a link to another file.
    segment_path(log, 7).write_bytes(header_line(7, 100, 0) + line)
    log.write_bytes(header_line(7, 1000, 0) + line)
    assert steps_of(log) == [1, 1]
    (tmp_path / "other").write_bytes(line)
    segment_path(log, 8).symlink_to(tmp_path / "other")
    log.write_bytes(header_line(8, 1000, 0) + line)
    assert steps_of(log) == [1]
    for damaged in (b'{"kind": "continues"}\n', b'{"kind": "continues", "segment": "7", "num_bytes": 1}\n'):
        log.write_bytes(damaged + line)
        assert steps_of(log) == [1]


def test_without_hard_links_a_long_log_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_log, "_MAX_COPIED_BYTES", 10)
    log = tmp_path / "log.jsonl"
    log.write_text("".join(f'{{"kind": "step", "step": {step}}}\n' for step in range(1, 100)))

    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "no hard links")

    monkeypatch.setattr("os.link", refuse)
    open_log(log, 90).close()
    assert steps_of(log) == [*range(1, 91)] and [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]


def test_a_full_disk_is_an_error_and_not_a_reason_to_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_log, "_MAX_COPIED_BYTES", 10)
    log = tmp_path / "log.jsonl"
    log.write_text("".join(f'{{"kind": "step", "step": {step}}}\n' for step in range(1, 100)))

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "the disk is full")

    monkeypatch.setattr("os.link", refuse)
    with pytest.raises(OSError, match="the disk is full"):
        open_log(log, 90)
    assert steps_of(log) == [*range(1, 100)] and [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]


def transferred_bytes() -> int:
    """Return how many bytes this process has read and written, from a disk or its cache."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"]) + int(counts["wchar"])


def test_a_restart_with_a_long_log_reads_and_writes_no_more_than_with_a_short_one(
    byte_corpus: Corpus, tmp_path: Path
) -> None:
    def config(folder: str, num_steps: int) -> RunConfig:
        return parse_config(
            {
                "data": {"train": byte_corpus.location, "lanes": 8, "window": 20},
                "model": {"hidden": 12},
                "train": {"steps": num_steps},
                "run": {"folder": tmp_path / folder},
            }
        )

    list(Run(config("long", 3)).events())
    shutil.copytree(tmp_path / "long", tmp_path / "short")
    shutil.copytree(tmp_path / "long", tmp_path / "first")
    log, length = tmp_path / "long" / "log.jsonl", 200 << 20
    with log.open("r+b") as file:
        end = file.read()
        file.seek(0)
        line = b'{"kind": "step", "step": 0, "note": "%s"}\n' % (b"x" * 1000)
        block = line * 1000
        for _ in range(length // len(block)):
            file.write(block)
        file.write(end)
    transferred = {}
    for folder in ("first", "short", "long"):  # the first one also imports modules
        before = transferred_bytes()
        list(Run(config(folder, 6)).events())
        transferred[folder] = transferred_bytes() - before
    assert transferred["long"] < transferred["short"] + (1 << 20) < length / 10, transferred
    segments = list_segments(log)
    assert len(segments) == 2 and steps_of(log)[-6:] == [1, 2, 3, 4, 5, 6]
    assert sum(1 for _ in segment_lines(segments)) > length // len(block) * 1000
    shutil.rmtree(tmp_path / "long")
