"""Ranks restore together: each byte of a checkpoint is read once, whatever layout saved it, and all get the same."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from helpers.rank_pool import RankPools
from helpers.restoring_ranks import (
    GRID,
    MAX_READ,
    PLAIN_MODEL,
    REPLICAS,
    STAGES,
    HeldRows,
    SavedModel,
    check_restored,
    held_rows,
    make_trainer,
    restore,
    restore_or_fail,
    save,
)
from stretto import Layout, World
from stretto.checkpoint import find_checkpoint
from stretto.checkpoint.segments import segments_of
from stretto.checkpoint.storage import LocalStorage
from stretto.errors import ConfigError, DataError
from stretto.mesh.topology import Topology

TRANSPOSED = Layout(replicas=2, stages=2, adjacent="replicas")


def restore_and_count(
    world: World, location: Path, layout: Layout, model: SavedModel = PLAIN_MODEL
) -> tuple[HeldRows, int, list[str]]:
    """Restore; return also how many bytes this rank has read from storage, and which small files."""
    sizes: list[int] = []  # of the reads; several threads read
    names: list[str] = []

    def counting(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(storage: LocalStorage, name: str, *arguments: int) -> bytes | bytearray:
            content: bytes | bytearray = method(storage, name, *arguments)
            sizes.append(len(content))
            if not arguments:
                names.append(name)
            return content

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("read", "read_range"):
            patch.setattr(LocalStorage, name, counting(getattr(LocalStorage, name)))
        held = restore(world, location, layout, model)
    return held, sum(sizes), names


@pytest.fixture(scope="module")
def saved_by(pools: RankPools, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of checkpoints that 4 ranks have saved, by layout."""
    folders = {}
    for name, layout in (("replicas", REPLICAS), ("grid", GRID)):
        folders[name] = tmp_path_factory.mktemp(name)
        written = pools[4].run(save, folders[name], layout)
        # The ranks of a stage write equal shares, whatever the sizes of its tensors are.
        for stage in range(layout.stages):
            of_stage = written[stage :: layout.stages]
            assert min(of_stage) > 0.99 * max(of_stage) > 1e6
    return folders


@pytest.mark.parametrize(
    ("saver", "layout"),
    [("replicas", REPLICAS), ("grid", GRID), ("grid", REPLICAS), ("replicas", STAGES), ("grid", TRANSPOSED)],
    ids=["4 replicas", "2 x 2", "2 x 2 to 4 replicas", "4 replicas to 4 stages", "2 x 2 to adjacent replicas"],
)
def test_all_ranks_together_read_a_checkpoint_once(
    saver: str, layout: Layout, saved_by: dict[str, Path], pools: RankPools
) -> None:
    folder = saved_by[saver]
    checkpoint = find_checkpoint(folder)
    results = pools[4].run(restore_and_count, folder, layout)
    check_restored([held for held, _, _ in results], Path(checkpoint.location), checkpoint.manifest)
    counts = [num_bytes for _, num_bytes, _ in results]
    assert sum(counts) <= MAX_READ * checkpoint.manifest.num_bytes
    # The ranks of a stage read about the same: a share begins and ends with whole segments.
    segments = [segment for file in checkpoint.manifest.files for segment in segments_of(checkpoint.manifest, file, "")]
    largest = max(segment.num_bytes for segment in segments)
    assert largest < 1.1e6
    small = len(checkpoint.manifest.dump()) + 10_000  # that, and the claims
    topology = Topology(layout.replicas, layout.stages, layout.adjacent)
    for stage in range(layout.stages):
        of_stage = [counts[rank] for rank in topology.stage_ranks(stage)]
        assert max(of_stage) - min(of_stage) <= 2 * largest + small
    manifests = [name for _, _, names in results for name in names if name.endswith("manifest.json")]
    # Once to choose, and once more after the claim: another launch may have removed it in between.
    assert len(manifests) == 2, "rank 0 reads it for all"


def test_a_weight_that_two_stages_hold_is_read_once(pools: RankPools, tmp_path: Path) -> None:
    """The table is a quarter of the model."""
    model = SavedModel(num_tokens=2000)
    pools[4].run(save, tmp_path, STAGES, model)
    checkpoint = find_checkpoint(tmp_path)
    for layout in (GRID, STAGES):
        results = pools[4].run(restore_and_count, tmp_path, layout, model)
        check_restored([held for held, _, _ in results], Path(checkpoint.location), checkpoint.manifest)
        assert sum(num_bytes for _, num_bytes, _ in results) <= MAX_READ * checkpoint.manifest.num_bytes


def test_lanes_are_read_once_by_more_replicas_than_have_saved_them(pools: RankPools, tmp_path: Path) -> None:
    """Lanes are a quarter of the checkpoint, and the cuts between replicas are within segments."""
    model = SavedModel(num_lanes=1000)
    save(World(0, 1, torch.device("cpu")), tmp_path, Layout(), model)
    checkpoint = find_checkpoint(tmp_path)
    shards = [shard for file in checkpoint.manifest.files for shard in checkpoint.manifest.shards(file, "")]
    lanes = sum(shard.num_bytes for shard in shards if shard.name.startswith("lanes."))
    assert lanes > 0.25 * checkpoint.manifest.num_bytes
    assert all(250 % shard.rows_per_digest for shard in shards if shard.name.startswith("lanes."))
    for layout in (REPLICAS, GRID):
        results = pools[4].run(restore_and_count, tmp_path, layout, model)
        check_restored([held for held, _, _ in results], Path(checkpoint.location), checkpoint.manifest)
        assert sum(num_bytes for _, num_bytes, _ in results) <= MAX_READ * checkpoint.manifest.num_bytes


@pytest.mark.parametrize("adjacent", ["stages", "replicas"])
def test_spans_of_replicas_read_a_checkpoint_once(
    adjacent: Literal["stages", "replicas"], pools: RankPools, tmp_path: Path
) -> None:
    layout, model = Layout(replicas=2, spans=2, adjacent=adjacent), SavedModel(has_spans=True)
    written = pools[4].run(save, tmp_path, layout, model)
    assert min(written) > 0.99 * max(written) > 1e6
    checkpoint = find_checkpoint(tmp_path)
    results = pools[4].run(restore_and_count, tmp_path, layout, model)
    check_restored([held for held, _, _ in results], Path(checkpoint.location), checkpoint.manifest)
    counts = [num_bytes for _, num_bytes, _ in results]
    assert min(counts) > 1e6 and sum(counts) <= MAX_READ * checkpoint.manifest.num_bytes


def test_one_process_reads_all_that_ranks_have_saved(saved_by: dict[str, Path]) -> None:
    for folder in saved_by.values():
        checkpoint = find_checkpoint(folder)
        trainer = make_trainer(World(0, 1, torch.device("cpu")), Layout(), PLAIN_MODEL)
        trainer.restore(checkpoint)
        check_restored([held_rows(trainer)], Path(checkpoint.location), checkpoint.manifest)


@pytest.mark.parametrize("layout", [REPLICAS, GRID], ids=["4 replicas", "2 x 2"])
def test_a_damaged_file_ends_all_ranks_with_the_same_error(
    layout: Layout, pools: RankPools, saved_by: dict[str, Path]
) -> None:
    folder = saved_by["replicas"]
    path = Path(find_checkpoint(folder).location) / "rank-00002.safetensors"
    content = path.read_bytes()
    try:
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        damaged = pools[4].run(restore_or_fail, folder, layout)
        path.unlink()
        missing = pools[4].run(restore_or_fail, folder, layout)
    finally:
        path.write_bytes(content)
    remedy = "resume from a different checkpoint, or copy it again"
    assert damaged == [f"{path} is damaged (checksum mismatch); {remedy}"] * 4
    assert missing == [f"{path} is damaged (it is missing); {remedy}"] * 4


def test_a_trainer_refuses_to_continue_after_a_failed_restore(tmp_path: Path) -> None:
    world = World(0, 1, torch.device("cpu"))
    save(world, tmp_path, Layout())
    checkpoint = find_checkpoint(tmp_path)
    path = Path(checkpoint.location) / "rank-00000.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    trainer = make_trainer(world, Layout(), PLAIN_MODEL)
    with pytest.raises(DataError, match="checksum mismatch"):
        trainer.restore(checkpoint)
    for call in (trainer.advance, trainer.snapshot):
        with pytest.raises(ConfigError, match=r"the last restore\(\) failed, so the weights may be of two"):
            call()
    path.write_bytes(content)
    trainer.restore(checkpoint)
    check_restored([held_rows(trainer)], Path(checkpoint.location), checkpoint.manifest)
    assert trainer.advance().step == 2


def restore_each_its_own(world: World, locations: list[str]) -> str:
    trainer = make_trainer(world, REPLICAS, PLAIN_MODEL)
    checkpoint = find_checkpoint(locations[world.rank])
    try:
        trainer.restore(checkpoint)
    except DataError as error:
        world.barrier()
        return str(error)
    return ""


def test_ranks_that_restore_different_checkpoints_end_with_the_same_error(
    pools: RankPools, saved_by: dict[str, Path], tmp_path: Path
) -> None:
    location = Path(find_checkpoint(saved_by["replicas"]).location)
    # The same name and tensors of the same sizes: only the values differ.
    pools[4].run(save, tmp_path, REPLICAS, SavedModel(weight_seed=2))
    other = Path(find_checkpoint(tmp_path).location)
    assert other.name == location.name
    errors = pools[4].run(restore_each_its_own, [str(location), str(location), str(other), str(location)])
    assert (
        errors
        == [
            f"rank 2 restores {other}, but rank 0 restores {location}, which is not the same checkpoint; name the "
            "checkpoint, not its run, on every rank"
        ]
        * 4
    )
    # The path may differ, as that of a copy on each node.
    copy = shutil.copytree(location, tmp_path / "copy" / location.name)
    assert pools[4].run(restore_each_its_own, [str(location), str(copy)] * 2) == [""] * 4
