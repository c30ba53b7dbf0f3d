"""Damaged or malicious checkpoints are refused by name; no code in them runs and no link in them is followed."""

import hashlib
import json
import math
import os
import pickle
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from stretto import Checkpoint, CheckpointManager, Run, StrettoError, load_model
from stretto.base.bounded_read import MAX_READ_BYTES
from stretto.base.checksummed_json import dump_with_checksum, load_with_checksum
from stretto.checkpoint import Snapshot, find_checkpoint
from stretto.checkpoint.manifest import MANIFEST, TrainingState
from stretto.checkpoint.shards import TensorShard
from stretto.config.toml import parse_config
from stretto.data import Corpus
from stretto.errors import ConfigError, DataError

SHARD = "rank-00000.safetensors"
NUM_BYTES = {"weights.w": 20 * 30 * 4, "lanes.0.0": 4 * 3 * 4}  # of the tensors that `save_two` saves


def training_state(step: int) -> TrainingState:
    return TrainingState(step=step, seed=1, optimizer="sgd", epoch=0, pool=0, index=step, progress=0.5)


def save_two(folder: Path) -> None:
    with CheckpointManager(folder) as checkpoints:
        checkpoints.start()
        for step in (1, 2):
            shards = [
                TensorShard("weights.w", torch.full((20, 30), float(step))),
                TensorShard("lanes.0.0", torch.ones(4, 3)),
            ]
            checkpoints.save(Snapshot(training_state(step), shards, files={"data_spec.json": b'{"a": 1}'}), wait=True)


def read_all(saved: Checkpoint) -> torch.Tensor:
    tensor = torch.zeros(20, 30)
    saved.read([TensorShard("weights.w", tensor), TensorShard("lanes.0.0", torch.zeros(4, 3))])
    saved.read_file("data_spec.json")
    return tensor


def newest(folder: Path) -> Path:
    return folder / "step-000000002-g1"


def flip(path: Path, place: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(place * (len(content) - 1))] ^= 1
    path.write_bytes(content)


def truncate(path: Path, place: float) -> None:
    os.truncate(path, max(int(place * (path.stat().st_size - 1)), 1))


@pytest.mark.parametrize("spoil", [flip, truncate])
@pytest.mark.parametrize("place", [0.0, 0.3, 0.77, 1.0])
@pytest.mark.parametrize("name", [MANIFEST, SHARD, "data_spec.json"])
def test_a_flipped_bit_or_a_lost_end_is_refused_by_name(
    name: str, place: float, spoil: Callable[[Path, float], None], tmp_path: Path
) -> None:
    save_two(tmp_path)
    path = newest(tmp_path) / name
    spoil(path, place)
    with pytest.raises(DataError, match=path.name), CheckpointManager(tmp_path) as checkpoints:
        saved = checkpoints.start()
        assert saved is not None
        read_all(saved)


def test_a_checkpoint_of_another_version_is_refused_in_a_sentence(tmp_path: Path) -> None:
    save_two(tmp_path)
    path = newest(tmp_path) / MANIFEST
    path.write_bytes(dump_with_checksum({**load_with_checksum(path.read_bytes()), "version": 8}))
    sentence = r"manifest.json is in format stretto checkpoint 8, not 9; continue with the version of stretto"
    with pytest.raises(DataError, match=sentence), CheckpointManager(tmp_path) as checkpoints:
        checkpoints.start()


def test_an_earlier_checkpoint_is_used_only_on_request(tmp_path: Path) -> None:
    save_two(tmp_path)
    flip(newest(tmp_path) / SHARD, 0.9)
    with CheckpointManager(tmp_path) as checkpoints:
        saved = checkpoints.start()
        assert saved is not None and saved.name == newest(tmp_path).name
        with pytest.raises(DataError, match="resume from a different checkpoint"):
            read_all(saved)
    with CheckpointManager(tmp_path) as checkpoints:
        saved = checkpoints.start(tmp_path / "step-000000001-g1")
        assert saved is not None
        assert torch.equal(read_all(saved), torch.ones(20, 30))
        # From now on the run's lineage goes through the requested checkpoint.
        checkpoints.save(Snapshot(training_state(7), [TensorShard("weights.w", torch.zeros(1))]), wait=True)
    assert find_checkpoint(tmp_path).manifest.training_state.step == 7


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    save_two(tmp_path)
    (newest(tmp_path) / SHARD).unlink()
    with pytest.raises(DataError, match=f"{SHARD} is damaged .it is missing."):
        read_all(find_checkpoint(tmp_path))


class Bomb:
    """Unpickled, it leaves a marker."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (str(self.marker),))


@pytest.mark.parametrize("name", [MANIFEST, SHARD, "data_spec.json", "claim"])
def test_a_pickle_is_never_unpickled(name: str, tmp_path: Path) -> None:
    save_two(tmp_path / "run")
    marker = tmp_path / "marker"
    path = newest(tmp_path / "run") / name if name != "claim" else tmp_path / "run" / "generations" / "000000001.json"
    for content in (pickle.dumps(Bomb(marker)), _torch_file(tmp_path, marker)):
        path.write_bytes(content)
        if name in (SHARD, "data_spec.json"):
            # An attacker can compute a checksum, too.
            _forge(newest(tmp_path / "run"), lambda tree: None)
        if name == "data_spec.json":
            content = find_checkpoint(tmp_path / "run").read_file(name) or b""
            assert isinstance(content, bytes), "bytes, for a reader of JSON"
        elif name == "claim":  # its number is taken, and that is all
            assert find_checkpoint(tmp_path / "run").manifest.training_state.step == 2
        else:
            with pytest.raises(DataError):
                read_all(find_checkpoint(tmp_path / "run"))
        with pytest.raises(StrettoError):
            load_model(tmp_path / "run")
        assert not marker.exists()
    # The bomb is a real one.
    pickle.loads(pickle.dumps(Bomb(marker)))  # noqa: S301
    assert marker.exists()


def _torch_file(folder: Path, marker: Path) -> bytes:
    torch.save(Bomb(marker), folder / "bomb.pt")
    return (folder / "bomb.pt").read_bytes()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _forge(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest as an attacker could: with the right sizes and checksums of the changed files."""
    path = folder / MANIFEST
    tree = load_with_checksum(path.read_bytes())
    for file in tree["files"]:
        content = (folder / file["name"]).read_bytes()
        if len(tree["table"]) == len(NUM_BYTES) or not file["groups"]:  # not the tensors of a real run
            file["header_bytes"] = max(len(content) - sum(NUM_BYTES.values()) * bool(file["groups"]), 0)
        file["num_bytes"] = len(content)
        file["sha256"] = _digest(content[: file["header_bytes"]])
    change(tree)
    path.write_bytes(dump_with_checksum(tree))


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/hostname", "..", ".", "", "a/b", "a\\b", "a\0b", MANIFEST, "../../x/y"]
)
def test_a_manifest_may_name_only_files_of_its_own_folder(name: str, tmp_path: Path) -> None:
    save_two(tmp_path)
    (tmp_path / "secret").write_text("x")

    def rename(tree: dict[str, Any]) -> None:
        tree["files"][0]["name"] = name

    _forge(newest(tmp_path), rename)
    with pytest.raises(DataError, match=f"{MANIFEST} is damaged"):
        find_checkpoint(tmp_path)


@pytest.mark.parametrize("name", [MANIFEST, SHARD, "data_spec.json"])
def test_symbolic_links_are_not_followed(name: str, tmp_path: Path) -> None:
    save_two(tmp_path / "run")
    path = newest(tmp_path / "run") / name
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=f"{name} is a symbolic link; if you trust its target"):
        read_all(find_checkpoint(tmp_path / "run"))


def test_a_folder_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    save_two(tmp_path / "run")
    newest(tmp_path / "run").rename(tmp_path / "elsewhere")
    newest(tmp_path / "run").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=f"{newest(tmp_path / 'run')} is a symbolic link"):
        read_all(find_checkpoint(tmp_path / "run"))


def test_the_folder_of_all_checkpoints_may_be_a_link_to_another_disk(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "checkpoints").symlink_to(tmp_path / "disk")
    save_two(tmp_path / "checkpoints")
    assert newest(tmp_path / "disk").is_dir()
    assert read_all(find_checkpoint(tmp_path / "checkpoints"))[0, 0] == 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("full_shape", [2**62, 2**62]),
        ("full_shape", [-1, 30]),
        ("full_shape", [10**15]),
        ("full_shape", "wide"),
        ("dtype", "object"),
        ("dtype", "load"),
        ("name", 7),
        ("name", "lanes.0.0"),
    ],
)
def test_absurd_tensors_are_refused_before_memory_is_allocated(field: str, value: object, tmp_path: Path) -> None:
    save_two(tmp_path)
    _forge(newest(tmp_path), lambda tree: tree["table"][1].update({field: value}))
    with pytest.raises(
        DataError, match=f"{MANIFEST} is damaged|is a different model|the checkpoint is from a different"
    ):
        read_all(find_checkpoint(tmp_path))


@pytest.mark.parametrize(
    "group",
    [[0, 1, -5, 20, 19], [0, 1, 3, 20, 20], [7, 1, 0, 20, 20], [-1, 1, 0, 20, 20], [0, 9, 0, 20, 20], [0, 0, 0, 20, 20],
     [0, 1, 0, 0, 20], [0, 1, 0, 2**62, 20], [0, 1, 0, 20, 0], [0, 1, 0, 20, 1 << 40], [0, 1, 0, 20], []],
)  # fmt: skip
def test_absurd_shards_are_refused_before_memory_is_allocated(group: list[int], tmp_path: Path) -> None:
    save_two(tmp_path)

    def change(tree: dict[str, Any]) -> None:
        file = next(file for file in tree["files"] if file["groups"])
        file["groups"][0 if tree["table"][0]["name"] == "lanes.0.0" else 1] = group

    _forge(newest(tmp_path), change)
    with pytest.raises(DataError, match=f"{MANIFEST} is damaged"):
        read_all(find_checkpoint(tmp_path))


def _header(entries: Mapping[str, object] | bytes, length: int | None = None) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text


DIGESTS = {
    "lanes.0.0": [_digest(struct.pack("<12f", *[1.0] * 12))],
    "weights.w": [_digest(struct.pack("<600f", *[2.0] * 600))],
}
METADATA = {"__metadata__": {"sha256": json.dumps(DIGESTS)}}


@pytest.mark.parametrize(
    ("header", "is_used"),
    [
        (_header(METADATA), True),
        (_header(METADATA, length=2**63), True),
        (_header(METADATA | {"weights.w": {"dtype": "F32", "shape": [2**60], "data_offsets": [0, 2**50]}}), True),
        (_header(METADATA | {"weights.w": {"dtype": "I64", "shape": [10, 30], "data_offsets": [0, 2400]}}), True),
        (_header(b"[" * 100_000), False),
        (_header({"__metadata__": {"sha256": json.dumps({})}}), False),
        (_header({"__metadata__": {"sha256": json.dumps({**DIGESTS, "weights.w": ["0" * 64]})}}), False),
        (_header({"__metadata__": {"sha256": json.dumps({**DIGESTS, "weights.w": 7})}}), False),
        (_header({"__metadata__": {"sha256": "[1]"}}), False),
        (_header({"__metadata__": 1}), False),
        (_header(b"[]"), False),
        (b"", False),
    ],
)
def test_of_a_header_only_the_checksums_are_used(header: bytes, is_used: bool, tmp_path: Path) -> None:
    save_two(tmp_path)
    path = newest(tmp_path) / SHARD
    path.write_bytes(header + path.read_bytes()[-sum(NUM_BYTES.values()) :])
    with pytest.raises(DataError, match=f"{SHARD} is damaged"):
        read_all(find_checkpoint(tmp_path))
    _forge(newest(tmp_path), lambda tree: None)
    if is_used:
        assert torch.equal(read_all(find_checkpoint(tmp_path)), torch.full((20, 30), 2.0))
    else:
        with pytest.raises(DataError, match=f"{SHARD} (is damaged|has more digests)"):
            read_all(find_checkpoint(tmp_path))


@pytest.mark.parametrize("content", [b"", bytes(2447)], ids=["empty", "one byte short"])
def test_a_file_that_is_smaller_than_its_shards_is_refused(content: bytes, tmp_path: Path) -> None:
    save_two(tmp_path)
    (newest(tmp_path) / SHARD).write_bytes(content)
    _forge(newest(tmp_path), lambda tree: None)
    with pytest.raises(DataError, match=f"{SHARD} has more digests than its header"):
        read_all(find_checkpoint(tmp_path))


def test_a_file_that_is_not_a_manifest_is_refused(tmp_path: Path) -> None:
    save_two(tmp_path)
    path = newest(tmp_path) / MANIFEST
    for content in (b"{}", b"[]", b"null", b"[" * 200_000, b"\xff\xfe", json.dumps({"sha256": "0"}).encode()):
        path.write_bytes(content)
        with pytest.raises(DataError, match=f"{MANIFEST} is damaged"):
            find_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("shape", "group"),
    [((10**12,), [0, 1, 0, 10**12, 1]), ((2**62, 0), [0, 1, 0, 2**62, 1])],
    ids=["digests", "rows without bytes"],
)
def test_a_small_manifest_never_takes_much_memory(shape: tuple[int, ...], group: list[int], tmp_path: Path) -> None:
    save_two(tmp_path)

    def change(tree: dict[str, Any]) -> None:
        file = next(file for file in tree["files"] if file["groups"])
        tree["table"] = [{"name": "weights.w", "dtype": "uint8", "full_shape": list(shape)}]
        file["groups"], file["num_bytes"] = [group], file["header_bytes"] + math.prod(shape)

    _forge(newest(tmp_path), change)
    checkpoint = find_checkpoint(tmp_path)
    file = next(file for file in checkpoint.manifest.files if file.groups)
    assert "has more digests than its header" in str(checkpoint.check(file))


def test_a_manifest_lists_no_more_shards_than_a_run_can_have(tmp_path: Path) -> None:
    save_two(tmp_path)
    _forge(
        newest(tmp_path), lambda tree: tree["files"][0].update(groups=[[0, 2, 0, 1, 1]] * (1 << 21) + [[0, 1, 0, 1, 1]])
    )
    with pytest.raises(DataError, match="it has too many shards"):
        find_checkpoint(tmp_path)


def test_an_empty_manifest_is_what_a_kill_leaves_without_hard_links(tmp_path: Path) -> None:
    save_two(tmp_path)
    (newest(tmp_path) / MANIFEST).write_bytes(b"")
    assert find_checkpoint(tmp_path).manifest.training_state.step == 1


def test_shards_that_overlap_and_leave_a_gap_are_refused(tmp_path: Path) -> None:
    save_two(tmp_path)

    def shift(tree: dict[str, Any]) -> None:
        index = next(index for index, tensor in enumerate(tree["table"]) if tensor["name"] == "lanes.0.0")
        tree["table"][index]["full_shape"][0] = 8
        next(group for file in tree["files"] for group in file["groups"] if group[0] == index)[2] = 4

    _forge(newest(tmp_path), shift)
    saved = find_checkpoint(tmp_path)
    with pytest.raises(DataError, match=r"rows of lanes\.0\.0 are missing or saved twice"):
        saved.read([TensorShard("lanes.0.0", torch.zeros(8, 3))])


def test_code_that_a_checkpoint_names_does_not_run(byte_corpus: Corpus, tmp_path: Path) -> None:
    config = parse_config(
        {
            "data": {"train": byte_corpus.location, "lanes": 8, "window": 20},
            "model": {"hidden": 8},
            "train": {"steps": 2},
            "run": {"folder": tmp_path / "run"},
        }
    )
    list(Run(config).events())
    (tmp_path / "run" / "weights.safetensors").unlink()
    folder = Path(find_checkpoint(tmp_path / "run").location)
    marker = tmp_path / "marker"
    (folder / "evil.py").write_text(f"import os\nos.mkdir({str(marker)!r})\nmodel = None\n")

    def name_code(tree: dict[str, object]) -> None:
        run_info = tree["run_info"]
        assert isinstance(run_info, dict)
        run_info["config"]["model"]["factory"] = f"{folder / 'evil.py'}:model"

    _forge(folder, name_code)
    with pytest.raises(ConfigError, match="would run Python code"):
        load_model(tmp_path / "run")
    assert not marker.exists()

    def widen(tree: dict[str, object]) -> None:
        run_info = tree["run_info"]
        assert isinstance(run_info, dict)
        run_info["config"]["model"] |= {"factory": None, "hidden": 2_000_000}

    _forge(folder, widen)
    with pytest.raises(ConfigError, match=r"of shape \[256, 2000000\], but .* has it as \[256, 8\]"):
        load_model(tmp_path / "run")


def test_a_pipe_in_the_place_of_a_file_is_refused(tmp_path: Path) -> None:
    save_two(tmp_path)
    for name in (SHARD, MANIFEST):
        (newest(tmp_path) / name).unlink()
        os.mkfifo(newest(tmp_path) / name)
        with pytest.raises(DataError):
            read_all(find_checkpoint(tmp_path))


@pytest.mark.parametrize("name", [MANIFEST, "data_spec.json"])
def test_a_file_that_is_too_large_is_not_read(name: str, tmp_path: Path) -> None:
    save_two(tmp_path)
    path = newest(tmp_path) / name
    os.truncate(path, MAX_READ_BYTES + 1)
    if name == "data_spec.json":
        _forge(newest(tmp_path), lambda tree: None)
        problem = f"{MANIFEST} is damaged .files.1.header_bytes"
    else:
        problem = f"{path.name} is larger than 128 MiB, the limit for files of its kind"
    with pytest.raises(DataError, match=problem):
        read_all(find_checkpoint(tmp_path))


def test_a_download_ends_where_the_manifest_says_that_the_file_ends(tmp_path: Path) -> None:
    save_two(tmp_path)
    filesystem = fsspec.filesystem("memory")
    filesystem.put(f"{tmp_path}/", "/large/", recursive=True)
    path = f"/large/{newest(tmp_path).name}/{SHARD}"
    filesystem.pipe_file(path, filesystem.cat_file(path) + bytes(100 << 20))
    try:
        with pytest.raises(DataError, match=rf"{SHARD} is damaged .it has more than [\d,]+ bytes."):
            read_all(find_checkpoint("memory://large"))
    finally:
        filesystem.rm("/large", recursive=True)


def test_claims_are_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "generations").symlink_to(tmp_path / "private")
    with (
        pytest.raises(DataError, match="generations is a symbolic link"),
        CheckpointManager(tmp_path / "run") as checkpoints,
    ):
        checkpoints.start()
    assert list((tmp_path / "private").iterdir()) == []


@pytest.mark.parametrize("name", [SHARD, "data_spec.json", "folder"])
def test_a_save_does_not_follow_links(name: str, tmp_path: Path) -> None:
    """A run from someone else may hold the folder of a checkpoint that is to be saved, with links in it."""
    private = tmp_path / "private"
    private.mkdir()
    (private / name).write_text("precious")
    folder = tmp_path / "run" / "step-000000001-g1"
    if name == "folder":
        (tmp_path / "run").mkdir()
        folder.symlink_to(private)
    else:
        folder.mkdir(parents=True)
        (folder / name).symlink_to(private / name)
    with suppress(DataError):  # or it saves elsewhere
        save_two(tmp_path / "run")
    assert {path.name: path.read_text() for path in private.iterdir()} == {name: "precious"}
