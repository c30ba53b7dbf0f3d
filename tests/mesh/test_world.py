import pytest

from stretto import ConfigError, MeshError, world
from stretto.mesh.world import _environment

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
        assert (alone.rank, alone.size, alone.is_alone, alone.is_first) == (0, 1, True, True)
        assert alone.find_lost([0]) is None


def test_what_torchrun_sets_is_read() -> None:
    place = _environment(WHOLE)
    assert (place.rank, place.size, place.local_rank, place.local_size, place.port) == (1, 4, 1, 2, 29500)


@pytest.mark.parametrize("absent", [name for name in WHOLE if name not in ("RANK",)])
def test_half_an_environment_is_a_mistake(absent: str) -> None:
    with pytest.raises(MeshError, match=f"but no {absent}; start the ranks with torchrun"):
        _environment({name: value for name, value in WHOLE.items() if name != absent})


def test_an_environment_that_is_no_number_is_a_mistake() -> None:
    with pytest.raises(MeshError, match="is not a number"):
        _environment({**WHOLE, "RANK": "one"})


def test_another_world_than_the_layout_needs_is_refused_before_anyone_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MeshError, match="the layout needs 2 ranks, but 1 was started; start 2"), world(2):
        pass
    for name, value in WHOLE.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MeshError, match="the layout needs 6 ranks, but 4 were started"), world(6):
        pass


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"run\.device='warp' is not a device"), world(device="warp"):
        pass
