import hashlib
import json
import os
import pickle
import zlib
from pathlib import Path

import numpy as np
import pytest

from helpers.paged_store import byte_ranges_of, bytes_of, flip_bit, write_store
from helpers.stores import write_series
from stretto.base.bounded_read import MAX_READ_BYTES
from stretto.errors import DataError
from stretto.store.file_writer import write_file
from stretto.store.index import Store, write_index
from stretto.store.pages import MAX_OPEN_FILES, PAGE_BYTES, ByteRange, LocalPages, PagedFile
from stretto.store.sequences import Sequences


def num_open(folder: Path) -> int:
    """Count the files of a folder that this process has open, as the kernel sees it."""
    return sum(path.readlink().is_relative_to(folder) for path in Path("/proc/self/fd").iterdir() if path.is_symlink())


def test_a_folder_gives_the_bytes_that_were_written(tmp_path: Path) -> None:
    folder = write_store(tmp_path / "store", num_shards=2)
    store = Store.open(folder)
    byte_ranges = byte_ranges_of(store)
    assert [content.tobytes() for content in store.pages.read(byte_ranges)] == bytes_of(folder, byte_ranges)


def test_sequences_are_cut_where_they_end(tmp_path: Path) -> None:
    folder = write_store(tmp_path / "store", num_shards=2)
    sequences = Sequences.open(folder)
    values = np.fromfile(folder / "values-00001.bin", "<u2")
    ends = np.fromfile(folder / "ends-00001.bin", "<u8")
    first, third = sequences.read(sequences.step_ranges([(1, 0), (1, 2)]))
    assert np.array_equal(first, values[: ends[0]])
    assert np.array_equal(third, values[ends[1] : ends[2]])


@pytest.mark.long
def test_a_range_of_more_than_two_gibibytes_is_read_whole(tmp_path: Path) -> None:
    num_bytes = (2 << 30) + 5
    (tmp_path / "shard.bin").touch()
    os.truncate(tmp_path / "shard.bin", num_bytes)  # a sparse file
    page_sums = [zlib.crc32(bytes(PAGE_BYTES))] * (num_bytes // PAGE_BYTES) + [zlib.crc32(bytes(5))]
    pages = LocalPages(tmp_path, [PagedFile("shard.bin", num_bytes, np.array(page_sums, np.uint32))])
    (content,) = pages.read([ByteRange("shard.bin", 0, num_bytes)])
    assert len(content) == num_bytes


def test_many_shards_keep_few_files_open(tmp_path: Path) -> None:
    files = [write_file(tmp_path / f"shard-{number}.bin", bytes([number % 251]) * 100) for number in range(500)]
    pages = LocalPages(tmp_path, files)
    held = pages.read([ByteRange(files[0].name, 10, 20)])[0]
    for _ in range(2):
        for number, file in enumerate(files):
            assert pages.read([ByteRange(file.name, 99, 100)])[0].tolist() == [number % 251]
    assert num_open(tmp_path) == MAX_OPEN_FILES
    del pages
    assert num_open(tmp_path) == 0
    assert held.tolist() == [0] * 10


def test_a_flipped_bit_is_detected_when_its_page_is_first_read(tmp_path: Path) -> None:
    folder = write_store(tmp_path / "store", num_shards=1)
    flip_bit(folder / "values-00000.bin", PAGE_BYTES + 5)
    pages = Store.open(folder).pages
    assert len(pages.read([ByteRange("values-00000.bin", 0, PAGE_BYTES)])[0]) == PAGE_BYTES
    with pytest.raises(DataError, match=r"values-00000\.bin is damaged between bytes 1,048,576 and 2,097,152"):
        pages.read([ByteRange("values-00000.bin", PAGE_BYTES - 1, PAGE_BYTES + 1)])


def test_a_truncated_file_is_refused_when_the_store_is_opened(tmp_path: Path) -> None:
    folder = write_store(tmp_path / "store", num_shards=1)
    with (folder / "ends-00000.bin").open("r+b") as file:
        file.truncate(7_999)
    with pytest.raises(DataError, match=r"ends-00000\.bin has 7,999 bytes, not 8,000; copy it again"):
        Store.open(folder)


def test_pages_are_pickled_without_their_bytes(tmp_path: Path) -> None:
    file = write_file(tmp_path / "shard.bin", bytes(5 * PAGE_BYTES))
    pages = LocalPages(tmp_path, [file])
    pages.read([ByteRange("shard.bin", 0, 5 * PAGE_BYTES)])
    assert len(pickle.dumps(pages)) < 5_000


def test_an_empty_file_has_no_pages(tmp_path: Path) -> None:
    file: PagedFile = write_file(tmp_path / "empty.bin", b"")
    assert len(file.checksums) == 0
    assert LocalPages(tmp_path, [file]).read([ByteRange("empty.bin", 0, 0)])[0].size == 0


def test_a_file_that_is_truncated_while_it_is_read_is_one_sentence(tmp_path: Path) -> None:
    folder = write_store(tmp_path / "store", num_shards=1)
    pages = Store.open(folder).pages
    pages.read([ByteRange("values-00000.bin", 0, 3 * 2**19)])
    os.truncate(folder / "values-00000.bin", 100)
    with pytest.raises(DataError, match=r"values-00000\.bin was truncated after it was opened; copy it again"):
        pages.read([ByteRange("values-00000.bin", 50, 150)])


@pytest.mark.parametrize("damage", ['"num_bytes": Infinity', '"num_bytes": -1', '"num_bytes": 1.5', "[" * 100_000])
def test_an_index_with_an_impossible_size_is_one_sentence(damage: str, tmp_path: Path) -> None:
    folder = write_store(tmp_path / "store", num_shards=1)
    index = json.loads((folder / "index.json").read_text())
    del index["sha256"]
    if damage[0] == "[":
        (folder / "index.json").write_text(damage)
    else:
        index["files"][0]["num_bytes"] = json.loads(damage.split(": ")[1])
        index["sha256"] = hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()
        (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match=r"index\.json (is damaged|can't be read)") as caught:
        Store.open(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change", [{"std": [0.0, 1.0]}, {"std": [float("nan"), 1.0]}, {"mean": [0.5]}, {"names": ["c0", "c0"]}]
)
def test_an_impossible_scale_is_refused(change: dict[str, object], tmp_path: Path) -> None:
    write_series(tmp_path / "store", [[np.random.default_rng(1).normal(size=(9, 2)).astype(np.float32)]])
    index = json.loads((tmp_path / "store" / "index.json").read_text())
    del index["sha256"]
    index["fields"]["values"] |= change
    index["sha256"] = hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()
    (tmp_path / "store" / "index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match=r"index\.json is damaged \(values"):
        Sequences.open(tmp_path / "store")


@pytest.mark.parametrize("name", ["index.json", "checksums.bin", "values-00000.bin"])
def test_a_link_out_of_the_store_is_refused(name: str, tmp_path: Path) -> None:
    folder = write_store(tmp_path / "store", num_shards=1)
    (folder / name).rename(tmp_path / "outside")
    (folder / name).symlink_to(Path("..") / "outside")
    with pytest.raises(DataError, match=rf"{name} is a link to a file outside the store; copy the file itself"):
        Store.open(folder)


@pytest.mark.parametrize("name", ["index.json", "checksums.bin", "values-00000.bin"])
def test_a_link_to_a_folder_outside_the_store_is_refused(name: str, tmp_path: Path) -> None:
    folder = write_store(tmp_path / "store", num_shards=1)
    (tmp_path / "outside").mkdir()
    (folder / name).unlink()
    (folder / name).symlink_to(tmp_path / "outside")
    with pytest.raises(DataError, match=rf"{name} is a link to a file outside the store; copy the file itself"):
        Store.open(folder)


def test_missing_checksums_are_one_sentence(tmp_path: Path) -> None:
    folder = write_store(tmp_path / "store", num_shards=1)
    (folder / "checksums.bin").unlink()
    with pytest.raises(DataError, match=r"store: checksums\.bin can't be read \(.*\); copy or prepare the data again"):
        Store.open(folder)


def test_a_link_within_the_store_is_followed(tmp_path: Path) -> None:
    folder = write_store(tmp_path / "store", num_shards=1)
    byte_ranges = byte_ranges_of(Store.open(folder))
    expected = bytes_of(folder, byte_ranges)
    (folder / "ends-00000.bin").rename(folder / "moved.bin")
    (folder / "ends-00000.bin").symlink_to("moved.bin")
    assert [content.tobytes() for content in Store.open(folder).pages.read(byte_ranges)] == expected


def test_a_store_in_a_linked_folder_opens(tmp_path: Path) -> None:
    folder = write_store(tmp_path / "disk" / "store", num_shards=1)
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    (tmp_path / "other").symlink_to(folder)
    for linked in (tmp_path / "link" / "store", tmp_path / "other"):
        store = Store.open(linked)
        byte_ranges = byte_ranges_of(store)
        assert [content.tobytes() for content in store.pages.read(byte_ranges)] == bytes_of(folder, byte_ranges)


def test_a_link_that_leads_to_itself_is_one_sentence(tmp_path: Path) -> None:
    folder = write_store(tmp_path / "store", num_shards=1)
    (folder / "ends-00000.bin").unlink()
    (folder / "ends-00000.bin").symlink_to("ends-00000.bin")
    with pytest.raises(DataError, match=r"ends-00000\.bin is missing; copy it again"):
        Store.open(folder)


@pytest.mark.parametrize("name", ["index.json", "checksums.bin"])
def test_a_file_of_a_store_that_is_too_large_is_not_read(name: str, tmp_path: Path) -> None:
    folder = write_store(tmp_path / "store", num_shards=1)
    os.truncate(folder / name, MAX_READ_BYTES + 1)
    with pytest.raises(DataError, match=rf"{name} is larger than 128 MiB, the limit for files of its kind"):
        Store.open(folder)


def test_a_vocabulary_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    num_bytes = MAX_READ_BYTES + 1
    (tmp_path / "vocabulary.json").touch()
    os.truncate(tmp_path / "vocabulary.json", num_bytes)
    page_sums = np.array(
        [zlib.crc32(bytes(PAGE_BYTES))] * (MAX_READ_BYTES // PAGE_BYTES) + [zlib.crc32(b"\0")], np.uint32
    )
    write_index(tmp_path, "tokens", {}, [PagedFile("vocabulary.json", num_bytes, page_sums)])
    with pytest.raises(DataError, match=r"vocabulary\.json is larger than 128 MiB"):
        Store.open(tmp_path).read_file("vocabulary.json")


def test_a_pipe_in_the_place_of_an_index_is_refused(tmp_path: Path) -> None:
    folder = write_store(tmp_path / "store", num_shards=1)
    (folder / "index.json").unlink()
    os.mkfifo(folder / "index.json")
    with pytest.raises(DataError, match=r"index\.json is not a regular file"):
        Store.open(folder)


def test_a_store_that_another_rank_has_checked_is_checked_file_by_file(tmp_path: Path) -> None:
    folder = write_store(tmp_path / "store", num_shards=2)
    os.truncate(folder / "values-00001.bin", 100)
    pages = Store.open(folder, checks_files=False).pages
    assert len(pages.read([ByteRange("values-00000.bin", 0, 9)])[0]) == 9
    with pytest.raises(DataError, match=r"values-00001\.bin has 100 bytes, not .*; copy it again"):
        pages.read([ByteRange("values-00001.bin", 0, 9)])
