import json
from pathlib import Path

import pytest
import torch

from stretto import world
from stretto.errors import ConfigError, MeshError
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
        assert alone.find_lost_rank([0]) is None


def test_another_world_than_the_layout_needs_is_refused_before_anyone_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MeshError, match="the layout needs 2 ranks, but 1 was started; start 2"), world(2):
        pass
    for name, value in WHOLE.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MeshError, match="the layout needs 6 ranks, but 4 were started"), world(6):
        pass
    for name in WHOLE:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"worker": ["a:1", "b:1"]}}))
    with (
        pytest.raises(MeshError, match=r"but 2 were started; start 6 \(TF_CONFIG with 6 workers\)"),
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
    with pytest.raises(ConfigError, match=r"run\.device='warp' is not a device"), world(device="warp"):
        pass
