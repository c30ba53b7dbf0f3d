"""Regions find the other ranks at the first training call, however and whenever these were started."""

import os
from datetime import timedelta
from weakref import WeakKeyDictionary

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

from helpers.rank_pool import NEEDS_GLOO, RankPools, RanksFailedError
from stretto import World
from stretto.errors import ConfigError
from stretto.launch.rank_environment import free_port
from stretto.parallel import groups
from stretto.parallel.layout import Layout
from stretto.parallel.messages import Messages
from stretto.parallel.module import parallelize


def make() -> nn.LSTM:
    torch.manual_seed(0)
    return nn.LSTM(3, 4, 2).double()


def rows(rank: int) -> Tensor:
    return torch.randn(8, 2, 3, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def gradients(model: nn.Module, called: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """Return the mean of the gradients over the inputs."""
    model.zero_grad()
    torch.stack([called(x)[0].square().sum() for x in inputs]).mean().backward()  # type: ignore[no-untyped-call]
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def bind_with_three(world: World) -> str:
    model = parallelize(make(), Layout(2, 3))
    try:
        model(rows(0))
    except ConfigError as error:
        return str(error)
    return ""


def test_a_number_of_stages_that_does_not_divide_the_ranks_is_refused_on_all(pools: RankPools) -> None:
    assert pools[3].run(bind_with_three) == ["layout.stages=2 does not divide the 3 ranks; use a number that does"] * 3


def train_in_columns(world: World) -> tuple[list[int], float]:
    """The stages of a mesh are ranks 0 and 2, and 1 and 3."""
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2).T)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        send = Messages.all_to_all

        def noting(self: Messages, *arguments: object) -> list[Tensor]:
            found.extend(dist.get_process_group_ranks(self.group))
            return send(self, *arguments)  # type: ignore[arg-type]

        patch.setattr(Messages, "all_to_all", noting)
        plain, shared = make(), parallelize(make(), Layout(2, 3), mesh=mesh)
        pairs = zip(
            gradients(shared, DistributedDataParallel(shared), rows(world.rank)),
            gradients(plain, plain, *(rows(rank) for rank in range(4))),
            strict=True,
        )
        worst = max(float((one - other).abs().max()) for one, other in pairs)
    return found[:2], worst


@NEEDS_GLOO
def test_the_last_dimension_of_a_mesh_has_the_stages(pools: RankPools) -> None:
    found = pools[4].run(train_in_columns)
    assert [ranks for ranks, _ in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert max(worst for _, worst in found) < 1e-9


def train_alone(world: World) -> None:
    _set_pg_timeout(timedelta(seconds=2))
    if world.is_rank_zero:
        parallelize(make(), Layout(2, 3))(rows(0))


@NEEDS_GLOO
def test_a_rank_that_trains_alone_from_the_first_call_is_told_where_it_waits(pools: RankPools) -> None:
    with pytest.raises(RanksFailedError) as failed:
        pools[2].run(train_alone)
    assert failed.value.errors[0].startswith(
        "rank 0 is at its first call of LSTM, where all 2 ranks make their groups, but they did not all come"
    )


def train_twice(rank: int, ports: list[int]) -> None:
    """Train without a process group, with one, and with another one."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    torch.set_num_threads(1)
    plain, shared = make(), parallelize(make(), Layout(2, 3))
    for port in ports:
        alone = zip(gradients(shared, shared, rows(rank)), gradients(plain, plain, rows(rank)), strict=True)
        assert all(torch.equal(one, other) for one, other in alone)
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        dist.init_process_group(rank=rank, world_size=2)
        found = gradients(shared, DistributedDataParallel(shared), rows(rank))
        expected = gradients(plain, plain, rows(0), rows(1))
        assert all(torch.allclose(one, other, atol=1e-9) for one, other in zip(found, expected, strict=True))
        dist.destroy_process_group()


def test_ranks_with_an_address_and_a_port_train_in_two_process_groups_one_after_the_other() -> None:
    # As mp.spawn does, but from the fork server: once a test above has started it, it has imported torch.
    start_processes(train_twice, ([free_port(), free_port()],), nprocs=2, start_method="forkserver")  # type: ignore[no-untyped-call]


def bind_with_a_norm_and_weights_of_its_own(world: World) -> str:
    torch.manual_seed(world.rank)
    module = nn.Sequential(nn.BatchNorm1d(3), nn.LSTM(3, 4, 2))
    try:
        parallelize(module, Layout(2, 2))(torch.randn(6, 3))
    except ConfigError as error:
        return str(error)
    return ""


def test_ranks_with_different_weights_are_refused(pools: RankPools) -> None:
    for text in pools[2].run(bind_with_a_norm_and_weights_of_its_own):
        assert text.startswith("ranks have different weights in 1.weight_ih_l0; wrap the module in Distributed")


def train_without_ddp(world: World) -> str:
    torch.manual_seed(0)
    model = parallelize(nn.LSTM(3, 4, 2), Layout(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    try:
        for _ in range(20):
            optimizer.zero_grad()
            model(torch.randn(6, 3))[0].sum().backward()
            optimizer.step()
    except ConfigError as error:
        return str(error)
    return ""


def test_training_without_an_average_over_ranks_is_found(pools: RankPools) -> None:
    for text in pools[2].run(train_without_ddp):
        assert text.startswith("ranks have different weights in LSTM.weight_ih_l0; wrap the module in Distributed")


def bind_with_dropped_weights(world: World) -> bool:
    """Weights that are set before each call, and are others on each rank, as in AWD-LSTM."""
    model, name = make(), "weight_hh_l1"
    raw = nn.Parameter(model.get_parameter(name).detach())
    del model._parameters[name]
    parallelize(model, Layout(2, 3))
    torch.manual_seed(world.rank)
    setattr(model, name, nn.functional.dropout(raw))
    model(rows(world.rank))[0].sum().backward()
    return raw.grad is not None


def test_weights_that_are_not_parameters_may_differ(pools: RankPools) -> None:
    assert pools[2].run(bind_with_dropped_weights) == [True, True]


def hear_of_a_norm(world: World) -> list[str]:
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "say", said.append)
        patch.setattr(groups, "_said", set())
        for norm in (nn.BatchNorm1d(3), nn.BatchNorm1d(3).eval(), nn.SyncBatchNorm(3).eval()):
            torch.manual_seed(0)
            parallelize(nn.Sequential(norm, nn.LSTM(3, 4, 2)), Layout(2, 2))(torch.randn(6, 3))
    return said


def test_a_batch_norm_in_training_is_named(pools: RankPools) -> None:
    for said in pools[2].run(hear_of_a_norm):
        assert said == ["0: normalizes the rows of each rank by themselves, as with DDP; use nn.SyncBatchNorm"]


def bind_under_nccl(world: World, variables: dict[int, dict[str, str]]) -> list[str]:
    """Return what a rank whose backend would be NCCL says, or why it refuses."""
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
        patch.setattr(groups, "say_once", said.append)
        patch.setattr(groups, "_groups", WeakKeyDictionary())  # they are made anew
        for name, value in variables.get(world.rank, {}).items():
            patch.setenv(name, value)
        try:
            parallelize(make(), Layout(2, 2))(rows(world.rank))
        except ConfigError as error:
            return [str(error)]
    return [*{*said}]


def test_settings_that_put_all_messages_in_one_queue_are_refused_or_named(pools: RankPools) -> None:
    for said in pools[2].run(bind_under_nccl, {1: {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}}):
        assert said == ["NCCL_LAUNCH_ORDER_IMPLICIT=1 makes messages wait for others that they don't need; unset it"]
    said, _ = pools[2].run(bind_under_nccl, {0: {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}})
    assert said == ["CUDA_DEVICE_MAX_CONNECTIONS=1 makes kernels wait for messages; set it to 32 before CUDA is used"]
