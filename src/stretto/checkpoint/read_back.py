"""Reads back what a save has just written, so that a run never relies on a checkpoint that storage has damaged."""

from stretto.base.errors import DataError
from stretto.checkpoint.manifest import SavedFiles
from stretto.checkpoint.segments import check_segments, segments_of
from stretto.checkpoint.storage import Storage


def read_back(storage: Storage, folder: str, saved: SavedFiles) -> None:
    """Compare files, which this rank has written and synced, with their digests; raise DataError if one differs.

    The digests were computed from memory, so they also tell whether the right bytes were handed to the system. In the
    background there is no hurry, so one thread reads: it takes less time from the steps than several.
    """
    for file in saved.files:
        # Otherwise the bytes would come from the system's cache, and tell nothing about the disk.
        storage.drop_from_cache(f"{folder}/{file.name}")
        try:
            check_segments(storage, folder, segments_of(saved, file, folder))
        except DataError as error:
            problem, _, _ = str(error).partition(";")
            raise damaged_after_write(problem) from None


def damaged_after_write(problem: str) -> DataError:
    """Return the error for a file that is not as it was written; `problem` says which, and what is wrong with it."""
    return DataError(f"{problem} right after it was written; earlier checkpoints are intact, but check the storage")
