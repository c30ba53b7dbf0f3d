"""The calls of real steps with regions, executed under a model of CUDA's and NCCL's rules, finish on all ranks."""

from collections.abc import Iterator, Sequence
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from helpers.device_log import Event
from helpers.logged_regions import Change, Model, log_steps
from helpers.nccl_model import NcclModel, QueueOf
from helpers.rank_pool import NEEDS_GLOO, RankPools
from stretto import World
from stretto.parallel import Layout, region, rows

pytestmark = NEEDS_GLOO


def record(
    world: World, layout: Layout, changes: Sequence[Change] = (), is_packed: bool = False, model: type[Model] = Model
) -> tuple[list[Event], dict[str, int]]:
    """Return what this rank does in three steps, and how often its host waits for its device in the last one."""
    log, counts = log_steps(world, layout, changes, is_packed=is_packed, model=model)
    return log.events, {kind: count for kind, count in counts.items() if "_wait" in kind}


def queue_maps() -> Iterator[tuple[str, QueueOf | None]]:
    """Return which streams may share a hardware queue: none, all, and what chance brings together."""
    yield "a queue for each stream", None
    yield "one queue", lambda rank, stream: 0
    for seed in range(40):
        num_queues = 2 + seed % 7
        yield f"map {seed} to {num_queues} queues", partial(queue_by_chance, seed, num_queues)


def queue_by_chance(seed: int, count: int, rank: int, stream: str) -> int:
    return Random(f"{seed} {rank} {stream}").randrange(count)


def find_problems(logs: Sequence[Sequence[Event]]) -> list[str]:
    """Return the maps under which the ranks don't finish, each with one of the other rules."""
    rules: list[dict[str, Any]] = [{}, {"exclusive": True}, {"synchronous": True}]
    cases = [(name, queue_of, rule) for name, queue_of in list(queue_maps())[:2] for rule in rules]
    cases += [(name, queue_of, rules[index % 3]) for index, (name, queue_of) in enumerate(list(queue_maps())[2:])]
    problems = [(name, rule, NcclModel(logs, queue_of=queue_of, **rule).run()) for name, queue_of, rule in cases]
    return [f"{name}, {rule}: {problem}" for name, rule, problem in problems if problem]


@pytest.mark.parametrize(
    ("size", "layout", "is_packed"),
    [
        (2, Layout(2, 3, spans=2), False),
        (3, Layout(3, 2, recompute=True, spans=3), True),
        (4, Layout(4, 2, spans=4), False),
        (4, Layout(2, 4, spans=2), True),  # two replicas
    ],
    ids=str,
)
def test_the_calls_of_all_ranks_finish_and_no_host_waits_for_its_device(
    size: int, layout: Layout, is_packed: bool, pools: RankPools
) -> None:
    logs, waits = zip(*pools[size].run(record, layout, (), is_packed), strict=True)
    assert [*waits] == [{}] * size
    assert all({"kernel", "batch", "all_reduce", "meet"} <= {event.kind for event in log} for log in logs)
    assert find_problems(logs) == []


class EagerZeros(Model):
    """The layers of other stages do not enter with the token: they get their zeros where the backward begins."""

    def run_causal(self, x: Any) -> Any:  # noqa: ANN401
        own = {str(layer) for layer in range(4) if layer * dist.get_world_size() // 4 == dist.get_rank()}
        others = [parameter for name, parameter in self.causal.named_parameters() if name[-1] not in own]
        for parameter in others:
            parameter.requires_grad_(False)
        y, state = self.causal(x)
        for parameter in others:
            parameter.requires_grad_()
            y = y + 0 * parameter.sum()
        return y, state


def send_one_by_one(patch: pytest.MonkeyPatch) -> None:
    """Send the messages of a slot one after another, and not as one batch."""
    batch = dist.batch_isend_irecv
    patch.setattr(dist, "batch_isend_irecv", lambda ops: [work for op in ops for work in batch([op])])


@pytest.mark.parametrize(("changes", "model"), [((), EagerZeros), ((send_one_by_one,), Model)])
def test_the_deadlocks_that_regions_avoid_are_found_when_they_are_put_in(
    changes: tuple[Change, ...], model: type[Model], pools: RankPools
) -> None:
    logs = [events for events, _ in pools[2].run(record, Layout(2, 3, spans=2), changes, False, model)]
    problems = find_problems(logs)
    assert any("deadlock" in problem and problem.startswith("one queue") for problem in problems)


def copy_and_wait(patch: pytest.MonkeyPatch) -> None:
    """Copy indices to the device as torch does by default."""
    patch.setattr(rows, "to_device", lambda tensor, device: tensor.to(device))


def test_a_host_that_waits_is_found(pools: RankPools) -> None:
    for _, waits in pools[2].run(record, Layout(2, 3, spans=2), (copy_and_wait,), True):
        assert waits["host_wait: blocking copy"] > 0


class HalfModel(Model):
    def __init__(self) -> None:
        super().__init__()
        self.to(torch.bfloat16)

    def forward(self, data: Tensor, batch_sizes: Tensor | None) -> Tensor:
        return super().forward(data.to(torch.bfloat16), batch_sizes)


def hear_of_bf16(world: World, cudnn: int) -> set[str]:
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(region, "say_once", said.append)
        patch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
        log_steps(world, Layout(2, 2, spans=2), model=HalfModel)
    return {*said}


def test_a_cudnn_whose_recurrent_layers_have_no_bf16_is_named(pools: RankPools) -> None:
    told = "recurrent layers are slow in bf16 until torch 2.11, whose cuDNN has it; update torch"
    assert pools[2].run(hear_of_bf16, 91002) == [{told}] * 2
    assert pools[2].run(hear_of_bf16, 91300) == [set()] * 2
