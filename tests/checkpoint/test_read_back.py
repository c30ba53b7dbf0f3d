"""A checkpoint that storage has damaged is noticed before it counts, and before an older one is removed."""

from collections.abc import Iterable
from pathlib import Path

import fsspec
import pytest
import torch

from helpers.rank_pool import RankPools
from stretto import CheckpointManager, Run, World
from stretto.checkpoint import SaveReport, Snapshot, find_checkpoint, manager
from stretto.checkpoint.checkpoint import complete_checkpoint_names
from stretto.checkpoint.manifest import MANIFEST, TrainingState
from stretto.checkpoint.shards import TensorShard
from stretto.checkpoint.storage import LocalStorage, RemoteStorage
from stretto.config.toml import parse_config
from stretto.data import Corpus
from stretto.errors import DataError

SHARD = "rank-00000.safetensors"


class FlippingStorage(LocalStorage):
    """A disk that flips a bit of one file, after it was written, in the checkpoint of step 2."""

    def __init__(self, root: Path, file_name: str, place: float = 0.5) -> None:
        super().__init__(root)
        self._file_name, self._place = file_name, place

    def store(self, folder: str, paths: Iterable[Path]) -> None:
        written = list(paths)
        super().store(folder, written)
        for path in written:
            self._flip(path)

    def create(self, name: str, content: bytes) -> bool:
        is_new = super().create(name, content)
        self._flip(Path(self.location) / name)
        return is_new

    def _flip(self, path: Path) -> None:
        if path.name == self._file_name and path.parent.name.startswith("step-000000002"):
            content = bytearray(path.read_bytes())
            content[int(self._place * (len(content) - 1))] ^= 16
            path.write_bytes(content)


def snapshot(step: int, world: World | None = None) -> Snapshot:
    rank, size = (0, 1) if world is None else (world.rank, world.size)
    training_state = TrainingState(step=step, seed=1, optimizer="sgd", epoch=0, pool=0, index=step, progress=0.5)
    # Two digests per rank.
    shard = TensorShard("weights.w", torch.full((4, 300), float(step)), 4 * rank, 4 * size, digest_bytes=2400)
    return Snapshot(training_state, [shard], files={"data_spec.json": b'{"a": 1}'})


def steps(folder: Path) -> list[int]:
    return sorted(name.step for name in complete_checkpoint_names(LocalStorage(folder)))


@pytest.mark.parametrize("place", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("name", [SHARD, "data_spec.json", MANIFEST])
def test_a_damaged_save_is_named_and_the_old_checkpoint_is_kept(
    name: str, place: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "open_storage", lambda *_: FlippingStorage(tmp_path, name, place))
    with CheckpointManager(tmp_path, keep=1) as checkpoints:
        checkpoints.start()
        checkpoints.save(snapshot(1), wait=True)
        with pytest.raises(DataError, match=rf"step-000000002-g1/{name} is damaged .*right after it was written"):
            checkpoints.save(snapshot(2), wait=True)
        assert steps(tmp_path) == [1] and checkpoints.last_step == 1
        checkpoints.save(snapshot(3), wait=True)
        reports = list(iter(checkpoints.poll, None))
    assert [report.error is None for report in reports] == [True, False, True]
    assert steps(tmp_path) == [1, 3]
    tensor = torch.zeros(4, 300)
    find_checkpoint(tmp_path).read([TensorShard("weights.w", tensor)])
    assert (tensor == 3).all()


def test_without_verification_a_damaged_save_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "open_storage", lambda *_: FlippingStorage(tmp_path, SHARD))
    with CheckpointManager(tmp_path, keep=1, verify=False) as checkpoints:
        checkpoints.start()
        for step in (1, 2):
            checkpoints.save(snapshot(step), wait=True)
    assert steps(tmp_path) == [1, 2]


def save_with_a_bad_disk(world: World, folder: Path) -> list[str | None]:
    """Save three steps; the disk of rank 1 damages its file of the second one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager, "open_storage", lambda *_: FlippingStorage(folder, "rank-00001.safetensors"))
        with CheckpointManager(folder, world, keep=1) as checkpoints:
            checkpoints.start()
            for step in (1, 2, 3):
                checkpoints.save(snapshot(step, world))
            checkpoints.save(snapshot(4, world), wait=True)
            return [report.error for report in iter(checkpoints.poll, None)]


def test_the_first_rank_reports_the_damaged_file_of_another(pools: RankPools, tmp_path: Path) -> None:
    errors, others = pools[2].run(save_with_a_bad_disk, tmp_path)
    assert others == []
    assert [error is None for error in errors] == [True, False, True, True]
    assert "step-000000002-g1/rank-00001.safetensors is damaged (checksum mismatch)" in errors[1]
    assert steps(tmp_path) == [3, 4]


def test_a_run_continues_after_a_damaged_save(
    byte_corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    monkeypatch.setattr(manager, "open_storage", lambda *_: FlippingStorage(folder / "checkpoints", SHARD))
    config = parse_config(
        {
            "data": {"train": byte_corpus.location, "lanes": 8, "window": 20},
            "model": {"hidden": 8},
            "train": {"steps": 3},
            "run": {"folder": folder},
            "save": {"every": 1},
        }
    )
    events = list(Run(config).events())
    errors = {event.step: event.error for event in events if isinstance(event, SaveReport)}
    assert set(errors) == {1, 2, 3} and SHARD in (errors.pop(2) or "") and set(errors.values()) == {None}
    assert (folder / "weights.safetensors").exists()


@pytest.mark.parametrize(("verify", "num_reads"), [(None, 0), (True, 2)])
def test_object_storage_is_read_back_only_on_request(
    verify: bool | None, num_reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    read_range = RemoteStorage.read_range

    def count(storage: RemoteStorage, name: str, *arguments: int) -> bytearray:
        names.append(name)
        return read_range(storage, name, *arguments)

    monkeypatch.setattr(RemoteStorage, "read_range", count)
    try:
        with CheckpointManager("memory://read_back", verify=verify) as checkpoints:
            checkpoints.start()
            checkpoints.save(snapshot(1), wait=True)
    finally:
        fsspec.filesystem("memory").rm("/read_back", recursive=True)
    assert len(names) == num_reads
