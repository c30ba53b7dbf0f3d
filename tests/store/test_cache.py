import hashlib
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

import pytest

from stretto.errors import DataError
from stretto.store.cache import MIN_BYTES, Cache
from stretto.store.pages import PAGE_BYTES


def key(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def page(number: int) -> bytes:
    return bytes([number % 256]) * PAGE_BYTES


def opened(folder: Path, max_bytes: int = MIN_BYTES) -> Cache:
    cache = Cache(folder, max_bytes)
    cache.create()
    return cache


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.page"))


@contextmanager
def full_disk() -> Iterator[None]:
    """Limit the size of all files that this process writes to 1,000 bytes, through the kernel."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_cached_page_is_found_when_the_folder_is_opened_again(tmp_path: Path) -> None:
    opened(tmp_path).put(key(1), page(1))
    assert opened(tmp_path).get(key(1)) == page(1)
    assert opened(tmp_path).get(key(2)) is None


def test_a_cache_never_exceeds_its_size_limit(tmp_path: Path) -> None:
    cache = opened(tmp_path, 10 * PAGE_BYTES)
    for number in range(35):
        cache.put(key(number), page(number))
        assert size(tmp_path) <= 10 * PAGE_BYTES
    assert size(tmp_path) >= 8 * PAGE_BYTES
    assert cache.get(key(34)) == page(34)
    assert cache.get(key(0)) is None


def test_the_least_recently_used_pages_are_evicted_first(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    cache.put(key(0), page(0))
    for number in range(1, 30):
        cache.put(key(number), page(number))
        assert cache.get(key(0)) == page(0)
    assert cache.get(key(1)) is None


def fill(folder: Path, first: int) -> None:
    """Put and get pages while other processes do the same."""
    cache = opened(folder, 16 * PAGE_BYTES)
    for number in range(first, first + 40):
        cache.put(key(number), page(number))
        assert cache.get(key(number)) in (None, page(number))
        assert current_size(folder) <= 16 * PAGE_BYTES


def current_size(folder: Path) -> int:
    """Count bytes while other processes delete files."""
    count = 0
    for path in folder.rglob("*.page"):
        try:
            count += path.stat().st_size
        except FileNotFoundError:
            continue
    return count


def test_processes_share_a_folder_and_its_size_limit(tmp_path: Path) -> None:
    context = get_context("spawn")
    # The second process writes half of the first one's pages too, under the same names.
    workers = [context.Process(target=fill, args=(tmp_path, first)) for first in (0, 20, 100)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert 8 * PAGE_BYTES <= size(tmp_path) <= 16 * PAGE_BYTES


def test_a_reader_never_sees_a_part_of_a_page(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    cache.put(key(1), page(1))

    def write() -> None:
        for _ in range(100):
            cache.put(key(1), page(1))

    thread = threading.Thread(target=write)
    thread.start()
    seen = set()
    while thread.is_alive():
        content = cache.get(key(1))
        seen.add(None if content is None else len(content))
    thread.join()
    # It may be evicted at times, but there is never a part of it.
    assert PAGE_BYTES in seen and seen <= {None, PAGE_BYTES}


def test_a_partial_page_of_a_killed_process_is_evicted(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    code = "import os, sys; from pathlib import Path; from stretto.base.disk import atomic_path\n"
    code += "with atomic_path(Path(sys.argv[1])) as partial: partial.touch(); os._exit(9)"
    subprocess.run([sys.executable, "-c", code, tmp_path / "pages" / f"{key(100)}.page"], check=False)
    (left,) = (tmp_path / "pages").glob("*.partial")
    left.write_bytes(page(0)[:1000])
    os.utime(left, (0, 0))
    for number in range(20):
        cache.put(key(number), page(number))
    assert not left.exists()
    assert size(tmp_path) <= MIN_BYTES


def test_only_pages_are_ever_deleted(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    others = [tmp_path / "mine.txt", tmp_path / "pages" / "mine.txt", tmp_path / "pages" / "mine.partial"]
    for other in others:
        other.write_bytes(page(1))
        os.utime(other, (0, 0))
    for number in range(20):
        cache.put(key(number), page(number))
    assert all(other.exists() for other in others)


def test_an_invalid_size_file_is_counted_again(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    cache.put(key(0), page(0))
    assert (tmp_path / "pages" / "size").read_bytes() == b"%d" % PAGE_BYTES
    for number in range(20):
        (tmp_path / "pages" / "size").write_bytes(b"\xff nonsense")
        cache.put(key(number), page(number))
    assert size(tmp_path) <= MIN_BYTES


def test_a_full_disk_leaves_no_part_of_a_page(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    with full_disk(), pytest.raises(OSError, match="File too large"):
        cache.put(key(1), page(1))
    assert cache.get(key(1)) is None
    assert list(tmp_path.rglob("*.page*")) == []


def test_a_folder_that_can_not_be_created_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(DataError, match=r"data\.cache=.*file/cache can't be created .*; choose a different folder"):
        opened(tmp_path / "file" / "cache")


def test_a_size_limit_that_is_too_small_is_refused_with_the_minimum(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"max_bytes=8,388,607 is too small; use at least 8,388,608"):
        Cache(tmp_path, MIN_BYTES - 1)
    with pytest.raises(DataError, match=r"retry_seconds=-1 must be at least 0"):
        Cache(tmp_path, retry_seconds=-1)
