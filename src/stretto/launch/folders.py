"""Places: the folders that a run writes to, tried as a run would use them."""

import os
import shutil
import tempfile
import time
from pathlib import Path

from stretto.base.disk import fsync_folder
from stretto.base.errors import StrettoError
from stretto.base.remote import is_remote
from stretto.checkpoint.lock import FolderLock
from stretto.checkpoint.storage import open_storage
from stretto.config.run import RunConfig
from stretto.launch.finding import Finding, ok, problem, warning
from stretto.plan.units import format_bytes, format_seconds

_GB = 1 << 30
_NUM_WRITES = 5
_WRITE_BYTES = 1 << 20


def run_folders(config: RunConfig | None) -> dict[str, Path]:
    """Return the folders that a run writes to, by name; without a run, those of one started here."""
    if config is None:
        return {"run folder": Path("runs"), "cache": Path("~/.cache/stretto").expanduser()}
    places = {"run folder": config.run.folder, "cache": config.data.cache.expanduser()}
    if config.save.to is not None and not is_remote(config.save.to):
        places["checkpoints"] = Path(config.save.to)
    return places


def check_folder(what: str, folder: Path) -> list[Finding]:
    """Try all that a run does in a folder, in one of its own within it, or beside where it will be; leave nothing."""
    paths = (folder.absolute(), *folder.absolute().parents)
    there = next(path for path in paths if path.exists() or path.is_symlink())
    if not there.is_dir():
        return [problem(what, f"{there} is no folder", "choose another folder, or move away what is there")]
    try:
        made = tempfile.mkdtemp(prefix=".stretto-doctor-", dir=there)
    except OSError as error:
        remedy = "choose another folder, or get the right to write there"
        return [problem(what, f"{there} can't be written ({error.strerror})", remedy)]
    try:
        return [
            _space(what, there),
            _speed(f"{what}, disk", Path(made)),
            _check_guarantees(f"{what}, locks", Path(made)),
        ]
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _space(what: str, folder: Path) -> Finding:
    usage = shutil.disk_usage(folder)
    found = f"{folder}, {format_bytes(usage.free)} of {format_bytes(usage.total)} free"
    if usage.free < _GB // 10:
        return problem(what, found, "make room: checkpoints would not be saved")
    return warning(what, found, "make room for checkpoints and data") if usage.free < 2 * _GB else ok(what, found)


def _speed(what: str, folder: Path) -> Finding:
    """How long it takes until a file is safe, which is what every checkpoint waits for."""
    times = []
    for number in range(_NUM_WRITES):
        started = time.perf_counter()
        with (folder / f"written-{number}").open("wb") as file:
            file.write(os.urandom(_WRITE_BYTES))
            file.flush()
            os.fsync(file.fileno())
        fsync_folder(folder)
        times.append(time.perf_counter() - started)
    middle = sorted(times)[_NUM_WRITES // 2]
    found = f"{format_bytes(_WRITE_BYTES)} is safe after {format_seconds(middle)}"
    if middle > 1:
        return warning(what, found, "save less often (save.minutes), or to a local disk: saves will take long")
    return ok(what, found)


def _check_guarantees(what: str, folder: Path) -> Finding:
    """What keeps two runs apart and a checkpoint whole: a lock, and a name that only one can take."""
    storage = open_storage(folder / "storage")
    if not storage.create("kept/first", b"one") or storage.create("kept/first", b"two"):
        return problem(what, "a file that is there can be created again", "save to another filesystem (save.to)")
    if storage.read("kept/first") != b"one":
        return problem(what, "a file that was refused was written over", "save to another filesystem (save.to)")
    try:
        FolderLock(folder, seconds=0).release()
    except (StrettoError, OSError) as error:
        return problem(what, f"a lock can't be taken ({error})", "mount the folder with locks, or choose another")
    try:
        os.link(folder / "written-0", folder / "linked")
    except OSError as error:
        remedy = "nothing, if one process writes there at a time: names are then reserved in another way"
        return warning(what, f"no hard links ({error.strerror})", remedy)
    return ok(what, "locks, hard links and create-only all work")
