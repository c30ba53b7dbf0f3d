"""Checks of the folders that a run writes to: free space, write speed, locks."""

import os
import shutil
import tempfile
import time
from pathlib import Path

from stretto.base.disk import fsync_folder
from stretto.base.errors import StrettoError
from stretto.base.remote import is_remote
from stretto.base.units import format_bytes, format_seconds
from stretto.checkpoint.lock import FolderLock
from stretto.checkpoint.storage import open_storage
from stretto.config.run import RunConfig
from stretto.launch.finding import Finding, ok, problem, warning

_GIB = 1 << 30
_NUM_WRITES = 5
_WRITE_BYTES = 1 << 20


def run_folders(config: RunConfig | None) -> dict[str, Path]:
    """Return the folders that a run writes to, by name; without a config, `runs` and the default cache."""
    if config is None:
        return {"run folder": Path("runs"), "cache": Path("~/.cache/stretto").expanduser()}
    folders = {"run folder": config.run.folder, "cache": config.data.cache.expanduser()}
    if config.save.to is not None and not is_remote(config.save.to):
        folders["checkpoints"] = Path(config.save.to)
    return folders


def check_folder(name: str, folder: Path) -> list[Finding]:
    """Check free space, write speed and locks, in a temporary folder inside `folder` or its nearest existing parent."""
    paths = (folder.absolute(), *folder.absolute().parents)
    existing = next(path for path in paths if path.exists() or path.is_symlink())  # also a broken symlink
    if not existing.is_dir():
        return [problem(name, f"{existing} is not a folder", "choose a different folder, or move the file")]
    try:
        scratch = tempfile.mkdtemp(prefix=".stretto-doctor-", dir=existing)
    except OSError as error:
        remedy = "choose a different folder, or get permission to write there"
        return [problem(name, f"can't write to {existing} ({error.strerror})", remedy)]
    try:
        return [
            _check_space(name, existing),
            _check_speed(f"{name}, disk", Path(scratch)),
            _check_concurrent_writes(f"{name}, locks", Path(scratch)),
        ]
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _check_space(name: str, folder: Path) -> Finding:
    usage = shutil.disk_usage(folder)
    detail = f"{folder}, {format_bytes(usage.free)} of {format_bytes(usage.total)} free"
    if usage.free < _GIB // 10:
        return problem(name, detail, "free some space: otherwise checkpoints or data can't be written")
    if usage.free < 2 * _GIB:
        return warning(name, detail, "free some space for checkpoints and data")
    return ok(name, detail)


def _check_speed(name: str, folder: Path) -> Finding:
    """Measure how long a write with fsync takes, since every checkpoint waits for that."""
    times = []
    for number in range(_NUM_WRITES):
        started = time.perf_counter()
        with (folder / f"written-{number}").open("wb") as file:
            file.write(os.urandom(_WRITE_BYTES))
            file.flush()
            os.fsync(file.fileno())
        fsync_folder(folder)
        times.append(time.perf_counter() - started)
    median = sorted(times)[_NUM_WRITES // 2]
    detail = f"{format_bytes(_WRITE_BYTES)} on disk after {format_seconds(median)}"
    if median > 1:
        return warning(name, detail, "use a faster disk (each save waits for it), or save less often (save.minutes)")
    return ok(name, detail)


def _check_concurrent_writes(name: str, folder: Path) -> Finding:
    """Check exclusive creation, locks and hard links, which protect a folder that several processes write to."""
    storage = open_storage(folder / "storage")
    if not storage.create("kept/first", b"one") or storage.create("kept/first", b"two"):
        return problem(name, "exclusive creation does not work", "choose a folder on a different filesystem")
    if storage.read("kept/first") != b"one":
        return problem(name, "a failed exclusive create overwrote a file", "choose a folder on a different filesystem")
    try:
        FolderLock(folder, timeout_seconds=0).release()
    except (StrettoError, OSError) as error:
        return problem(name, f"can't lock a file ({error})", "enable locks on its filesystem, or choose another folder")
    try:
        os.link(folder / "written-0", folder / "linked")  # `_check_speed` has written the first
    except OSError as error:
        remedy = "use another disk if several processes write there: without hard links, one may read an empty file"
        return warning(name, f"no hard links ({error.strerror})", remedy)
    return ok(name, "locks, hard links and exclusive creation work")
