"""LogWriter: what it does when the disk of the log is full."""

import json
import logging
from pathlib import Path

import pytest

from helpers.small_disk import fill_disk, small_disk
from stretto.train.log import LogWriter


def test_a_full_disk_is_reported_once_and_again_when_it_has_space(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path / "disk", megabytes=1) as disk:
        filler = disk / "filler"
        with (disk / "log.jsonl").open("w", buffering=1) as file, caplog.at_level(logging.WARNING):
            writer = LogWriter(file)
            writer.write("step", {"step": 1})
            fill_disk(filler)
            for step in range(2, 2002):
                writer.write("step", {"step": step})
            assert [message.rpartition(" (")[0] for message in caplog.messages] == [f"{file.name} can't be written"]
            filler.unlink()
            writer.write("step", {"step": 2002})
            assert caplog.messages[1].startswith(f"{file.name} can be written again; it may lack up to ")
            assert len(caplog.messages) == 2
        last_line = (disk / "log.jsonl").read_text().splitlines()[-1]
        assert json.loads(last_line) == {"kind": "step", "step": 2002}
