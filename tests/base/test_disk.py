import os
import subprocess
import sys
from pathlib import Path

import pytest

from stretto.base.disk import write_atomic

WRITER = """
import sys
from pathlib import Path
from stretto.base.disk import write_atomic
for _ in range(30):
    write_atomic(Path(sys.argv[1]), sys.argv[2].encode() * 300_000)
"""


def test_a_link_in_the_place_of_the_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "report.html").symlink_to(tmp_path / "secret")
    write_atomic(tmp_path / "report.html", b"page")
    assert (tmp_path / "report.html").read_text() == "page" and not (tmp_path / "report.html").is_symlink()
    assert (tmp_path / "secret").read_text() == "secret"


def test_of_several_writers_each_writes_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, path, letter]) for letter in "abcd"]
    contents = set()
    while any(writer.poll() is None for writer in writers):
        contents.add(path.read_bytes() if path.exists() else b"")
    assert [writer.returncode for writer in writers] == [0] * 4
    assert contents | {path.read_bytes()} <= {b"", *(letter.encode() * 300_000 for letter in "abcd")}
    assert list(tmp_path.iterdir()) == [path]


def test_the_content_is_synced_before_the_rename_and_the_folder_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[object, ...]] = []
    fsync, replace = os.fsync, os.replace

    def recorded_fsync(descriptor: int) -> None:
        fsync(descriptor)
        calls.append(("fsync", os.fstat(descriptor).st_ino, os.fstat(descriptor).st_size))

    def recorded_replace(source: Path, target: Path) -> None:
        calls.append(("replace", Path(source).stat().st_ino, str(target)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    path = tmp_path / "config.toml"
    write_atomic(path, b"config")
    file, folder = path.stat(), tmp_path.stat()
    expected = [
        ("fsync", file.st_ino, 6),
        ("replace", file.st_ino, str(path)),
        ("fsync", folder.st_ino, folder.st_size),
    ]
    assert calls == expected
    write_atomic(path, b"page", sync=False)
    assert [name for name, *_ in calls[3:]] == ["replace"]


def test_a_file_has_the_mode_that_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_atomic(tmp_path / "config.toml", b"")
    finally:
        os.umask(before)
    assert (tmp_path / "config.toml").stat().st_mode & 0o777 == 0o640
