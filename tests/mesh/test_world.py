"""Joining a world of ranks, its collectives, and the device of a rank."""

import json
import os
import re
import time
from pathlib import Path

import pytest
import torch

from helpers.rank_pool import RankPool, RankPools, RanksFailedError
from stretto import World, world
from stretto.errors import ConfigError, DataError, MeshError
from stretto.mesh.all_gather import all_gather
from stretto.mesh.device import peak_memory

WHOLE = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}


def test_without_torchrun_we_are_alone() -> None:
    with world() as alone:
        assert (alone.rank, alone.size, alone.is_single_rank, alone.is_rank_zero) == (0, 1, True, True)
        alone.barrier()
        assert alone.all_reduce([2.0]) == [2.0] and alone.gather([1.0, 3.0]) == [[1.0, 3.0]]
        assert alone.gather_rows([1.0, 3.0]).tolist() == [[1.0, 3.0]]


def test_another_world_than_the_layout_needs_is_refused_before_anyone_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MeshError, match="the layout needs 2 ranks, but the job has 1; start 2"), world(2):
        pass
    for name, value in WHOLE.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MeshError, match="the layout needs 6 ranks, but the job has 4"), world(6):
        pass
    for name in WHOLE:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"worker": ["a:1", "b:1"]}}))
    with (
        pytest.raises(MeshError, match=r"but the job has 2; start 6 \(TF_CONFIG with 6 workers\)"),
        world(6),
    ):
        pass


def test_memory_is_told_whatever_the_name_of_the_process() -> None:
    name = Path("/proc/self/comm")
    before = name.read_bytes()
    try:
        name.write_bytes("entraîneur".encode())
        assert peak_memory(torch.device("cpu")) > 50e6, "torch alone takes more"
    finally:
        name.write_bytes(before)


def test_a_device_that_is_not_there_is_refused() -> None:
    message = r"^device='warp' \(run\.device in a config\) is not a device of this machine; use auto or cpu$"
    with pytest.raises(ConfigError, match=message), world(device="warp"):
        pass


def arrive_late(world: World) -> tuple[float, float]:
    """Return when this rank came to a barrier, which the last rank reaches late, and when it passed it."""
    if world.rank == world.size - 1:
        time.sleep(0.5)
    arrived = time.monotonic()
    world.barrier()
    return arrived, time.monotonic()


def test_a_barrier_holds_every_rank_until_the_last_has_come(pools: RankPools) -> None:
    arrived, passed = zip(*pools[3].run(arrive_late), strict=True)
    assert min(passed) >= max(arrived)


def die_before_the_barrier(world: World) -> None:
    if world.rank == 1:
        os._exit(7)
    world.barrier()


@pytest.mark.long
@pytest.mark.short
def test_a_barrier_names_the_rank_that_was_lost() -> None:
    ranks = RankPool(3)
    with pytest.raises(RanksFailedError) as caught:
        ranks.run(die_before_the_barrier, seconds=60)
    errors = caught.value.errors
    assert errors.pop(1) == "ended with code 7"
    assert sorted(errors) == [0, 2]
    for rank, message in errors.items():
        assert re.match(rf"rank {rank} lost rank 1( \(last seen [^)]+\))? while waiting in barrier; check", message)


def collect(world: World) -> tuple[list[list[float]] | None, str, list[float], list[list[float]]]:
    text = world.broadcast_text("grüße" if world.is_rank_zero else "ignored")
    values = world.broadcast(torch.full((2,), float(world.rank)), source=1).tolist()
    rows = world.gather_rows([2.0**48 + world.rank, -0.5]).tolist()
    return world.gather([float(world.rank)] * world.rank), text, values, rows


def test_collectives_give_every_rank_the_same_values_and_rank_0_all_of_them(pools: RankPools) -> None:
    gathered, texts, values, rows = zip(*pools[3].run(collect), strict=True)
    assert gathered == ([[], [1.0], [2.0, 2.0]], None, None)
    assert set(texts) == {"grüße"} and values == ([1.0, 1.0],) * 3
    assert rows == ([[2.0**48 + rank, -0.5] for rank in range(3)],) * 3


def gather_tensors(world: World) -> list[list[torch.Tensor]]:
    own = [torch.arange(6).view(2, 3), torch.tensor([], dtype=torch.bool), None][world.rank]
    scalar = None if world.rank == 1 else torch.tensor(0.5 + world.rank, dtype=torch.bfloat16)
    return [all_gather(world, own), all_gather(world, scalar), all_gather(world, None)]


def test_tensors_of_different_shapes_and_dtypes_are_gathered_on_every_rank(pools: RankPools) -> None:
    for own, scalars, nothing in pools[3].run(gather_tensors):
        assert own[0].tolist() == [[0, 1, 2], [3, 4, 5]] and own[0].dtype == torch.int64
        assert own[1].shape == (0,) and own[1].dtype == torch.bool and len(own) == 2
        assert [(float(tensor), tensor.shape, tensor.dtype) for tensor in scalars] == [
            (0.5, (), torch.bfloat16),
            (2.5, (), torch.bfloat16),
        ]
        assert nothing == []


def broadcast_large_text(world: World) -> bool:
    text = "ä" * 3_000_000
    return world.broadcast_text(text if world.rank == 1 else "", source=1) == text and not world.broadcast_bytes(b"")


def fail_on(world: World, ranks: tuple[int, ...]) -> str:
    """Some ranks fail; return the error that this rank gets."""
    try:
        with world.fail_together("trying"):
            if world.rank in ranks:
                raise DataError(f"rank {world.rank} found a problem")
    except DataError as error:
        world.barrier()  # no rank is left behind
        return str(error)
    return "none"


def test_any_rank_can_broadcast_bytes(pools: RankPools) -> None:
    assert all(pools[3].run(broadcast_large_text))


def test_the_error_of_one_rank_is_raised_on_all(pools: RankPools) -> None:
    assert pools[3].run(fail_on, ()) == ["none"] * 3
    assert pools[3].run(fail_on, (2,)) == ["rank 2 found a problem"] * 3
    assert pools[3].run(fail_on, (1, 2)) == ["rank 1 found a problem"] * 3
    assert fail_on(World(0, 1, torch.device("cpu")), (0,)) == "rank 0 found a problem"
