"""The device of a rank: it becomes torch's current one before anything runs on a device, and no other is used."""

import os
from collections.abc import Iterator

import pytest
import torch

from stretto.errors import ConfigError
from stretto.mesh.device import find_device

VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_MAX_CONNECTIONS")
Call = tuple[int, list[str | None]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Call]]:
    """A machine with 4 GPUs, as far as torch.accelerator tells. Yields the current devices set, and the variables."""
    calls: list[Call] = []
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(
        torch.accelerator,
        "set_device_index",
        lambda index: calls.append((index, [os.environ.get(name) for name in VARIABLES])),
    )
    monkeypatch.setattr(torch, "empty", lambda *_, **__: pytest.fail("an operation opens a context on a device"))
    yield calls
    for name in VARIABLES:
        os.environ.pop(name, None)


@pytest.mark.parametrize(
    ("name", "local_rank", "index"), [("auto", 2, 2), ("cuda", 3, 3), ("cuda:1", 0, 1), ("cuda:0", 0, 0)]
)
def test_the_current_device_is_set_and_no_other_device_is_touched(
    name: str, local_rank: int, index: int, calls: list[Call]
) -> None:
    local_size = 1 if ":" in name else 4
    assert find_device(name, local_rank, local_size) == torch.device("cuda", index)
    assert calls == [(index, [":4096:8", "32"])], "CUDA and cuBLAS read them when the first operation runs"


def test_variables_of_the_user_are_kept(monkeypatch: pytest.MonkeyPatch, calls: list[Call]) -> None:
    for name, value in zip(VARIABLES, (":16:8", "8"), strict=True):
        monkeypatch.setenv(name, value)
    find_device("auto")
    assert calls == [(0, [":16:8", "8"])]


def test_the_cpu_needs_neither(calls: list[Call]) -> None:
    assert find_device("cpu", 2, 4) == torch.device("cpu")
    assert calls == [] and not {*VARIABLES} & {*os.environ}


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize("name", ["cuda:4", "cuda:x", "mps", "meta", ""])
def test_a_name_that_is_not_a_device_of_the_machine_is_rejected(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"device={name!r} \(run\.device in a config\) is not a device"):
        find_device(name)


@pytest.mark.usefixtures("calls")
def test_several_ranks_do_not_share_a_device() -> None:
    with pytest.raises(ConfigError, match=r"device='cuda:1' .* is one device, but 2 ranks .*; use cuda, so that each"):
        find_device("cuda:1", 0, 2)
    with pytest.raises(ConfigError, match="5 ranks were started on this machine, more than its cuda devices"):
        find_device("cuda", 0, 5)


def test_a_rank_with_a_device_of_its_own_uses_it(monkeypatch: pytest.MonkeyPatch, calls: list[Call]) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    for name in ("cuda", "cuda:0"):
        assert find_device(name, 3, 4, has_own_devices=True) == torch.device("cuda", 0)
    assert calls == [(0, [":4096:8", "32"])] * 2


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_last_gpu_becomes_the_current_device() -> None:
    last = torch.cuda.device_count() - 1
    before = torch.cuda.current_device()
    try:
        assert find_device(f"cuda:{last}") == torch.device("cuda", last)
        assert torch.cuda.current_device() == last
        assert torch.empty(1, device="cuda").device.index == last
    finally:
        torch.cuda.set_device(before)
