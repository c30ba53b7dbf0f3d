"""The memory of spans: what is predicted to be kept is what the engine keeps, in the order that it executes."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from helpers.profiles import affine, bidirectional, kind, profile
from helpers.rank_pool import RankPools
from stretto import Layout, World, make_engine
from stretto.data import Window
from stretto.engine.recorder import ActionRecorder
from stretto.engine.span_messages import SpanMessages, StateSpec
from stretto.measure.span_sweeps import find_sweeps
from stretto.nn import MLSTM, BidirectionalLSTM, LossSum, MinGRU, Stack, State
from stretto.plan.actions import Action, ActionKind
from stretto.plan.cluster import Cluster
from stretto.plan.cost_model import CostModel
from stretto.plan.predict import predict
from stretto.plan.profile import Profile
from stretto.plan.span_costs import SpanCosts
from stretto.plan.span_schedule import span_schedules
from stretto.plan.workload import Workload

LOAD = Workload([[16] * 8])


def without_states(drawn: Profile) -> Profile:
    """Return the profile of a model whose states take no memory."""
    sweeps = tuple(sweep.model_copy(update={"state_bytes": 0}) for sweep in drawn.sweeps)
    return drawn.model_copy(update={"sweeps": sweeps})


def activations(drawn: Profile, layout: Layout) -> list[float]:
    prediction = predict(CostModel(without_states(drawn)), LOAD, layout, Cluster(layout.num_ranks))
    return [stage.memory.activations for stage in prediction.stages]


class SavedTensor:
    """What autograd keeps instead of a tensor, so that a test can see when it is freed."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def squared_error(y: Tensor, targets: Tensor) -> LossSum:
    return LossSum((y - targets).square().sum(), torch.tensor(y.numel()))


def find_actions_with_graphs(world: World, recompute: bool) -> list[tuple[str, bool]]:
    """Return the actions of a span with one affine block, and whether autograd keeps tensors after each of them."""
    saved: weakref.WeakSet[SavedTensor] = weakref.WeakSet()
    after_actions: list[tuple[str, bool]] = []

    def pack(tensor: Tensor) -> SavedTensor:
        packed = SavedTensor(tensor)
        saved.add(packed)
        return packed

    @contextmanager
    def record(recorder: ActionRecorder, span: int, action: Action) -> Iterator[None]:
        yield
        after_actions.append((f"{action.kind.value}{action.chunk}", len(saved) > 0))

    engine = make_engine(Stack([MinGRU(3, 3)]), squared_error, Layout(spans=2, recompute=recompute), world, seed=1)
    x = torch.randn(6, 2, 3)
    window = Window(6, torch.arange(2), torch.tensor([6, 6]), torch.ones(2, dtype=torch.bool), x, x)
    own_action = ActionRecorder.action
    ActionRecorder.action = record  # type: ignore[assignment, method-assign]
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed.tensor):
            engine.step(window, None, 0)
    finally:
        ActionRecorder.action = own_action  # type: ignore[method-assign]
    return after_actions


@pytest.mark.parametrize(("recompute", "first"), [(False, "F0"), (True, "B2")])
def test_the_graph_of_an_affine_block_exists_until_the_backward_of_its_run(
    recompute: bool, first: str, pools: RankPools
) -> None:
    order = ["F0", "F1", "F2", "B2", "B1", "B0"]
    expected = [(name, order.index(first) <= index < len(order) - 1) for index, name in enumerate(order)]
    assert pools[2].run(find_actions_with_graphs, recompute) == [expected, expected]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("spans", [2, 3])
@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_affine_blocks_are_kept_whole_in_the_order_that_is_executed(
    recompute: bool, spans: int, micro_batches: int
) -> None:
    drawn = affine(profile([kind(saved=1200.0, output_bytes=0.0)] * 3))
    layout = Layout(spans=spans, micro_batches=micro_batches, recompute=recompute)
    grid = SpanCosts(CostModel(drawn), layout).grid(spans, [spans] * micro_batches)
    rows, steps = LOAD.largest_chunk(1, micro_batches, spans)
    for actions, predicted in zip(span_schedules(grid), activations(drawn, layout), strict=True):
        live: set[tuple[int, int]] = set()
        max_live = 0
        for action in actions:
            (block, part), is_forward = divmod(action.chunk, 3), action.kind is ActionKind.FORWARD
            # The run comes first, and its backward last; with recomputation, nothing is kept from F2 to B2.
            if part == (0 if is_forward else 2) and (is_forward or recompute):
                live.add((action.micro_batch, block))
            max_live = max(max_live, len(live))
            if (part == 0 and not is_forward) or (part == 2 and is_forward and recompute):
                live.remove((action.micro_batch, block))
        assert not live and predicted == pytest.approx(max_live * 1200.0 * rows * steps / 128)


def test_a_recomputed_affine_block_needs_its_memory_beside_the_last_block() -> None:
    drawn = affine(profile([kind(saved=1000.0, output_bytes=0.0)] * 3 + [kind(saved=100.0, output_bytes=0.0)]), 3)
    # Half of the time steps. The last block and its backward follow the correction of the last affine one.
    assert activations(drawn, Layout(spans=2)) == pytest.approx([3 * 500 + 50] * 2)
    assert activations(drawn, Layout(spans=2, recompute=True)) == pytest.approx([500 + 50] * 2)


def test_the_last_block_waits_for_a_loss_over_whole_rows_which_saves_something_itself() -> None:
    kinds = [kind(saved=1000.0, output_bytes=0.0), kind(saved=100.0, output_bytes=0.0)]
    drawn = bidirectional(profile(kinds), 1).model_copy(update={"row_loss": True, "loss": kind(saved=4000.0)})
    # A span has half of the time steps of the blocks, and half of the rows of the loss.
    assert activations(drawn, Layout(spans=2)) == pytest.approx([500 + 50 + 2000] * 2)
    assert activations(drawn, Layout(spans=2, recompute=True)) == pytest.approx([2000] * 2)
    # The outputs of a span: 8 rows, 8 time steps. The gradients of both spans are gathered, beside three other tensors.
    wide = drawn.model_copy(update={"kinds": drawn.kinds | {"1": kind(saved=100.0, output_bytes=100.0)}})
    outputs = 100.0 * 8 * 8
    assert activations(wide, Layout(spans=2)) == pytest.approx([500 + 50 + outputs + (2 + 3) * outputs] * 2)


class HeldBytes:
    """Counts the bytes of messages that exist: each one is in the memory of an array, which is freed with it."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def add(self, message: Tensor) -> Tensor:
        """Return a copy of a message that is counted as long as anything refers to its memory."""
        array = message.numpy().copy()
        self.now += array.nbytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(array, self._remove, array.nbytes)
        return torch.from_numpy(array)

    def _remove(self, num_bytes: int) -> None:
        self.now -= num_bytes


MODELS: dict[str, Callable[[], Stack]] = {
    "two-sided": lambda: Stack([BidirectionalLSTM(8, 4) for _ in range(4)]),
    "affine": lambda: Stack([MLSTM(8, 8, 2) for _ in range(4)]),
}


def find_held_messages(world: World, name: str, layout: Layout) -> int:
    """Return the most bytes of messages that a span has at a time: sent, or received and not used yet."""
    held = HeldBytes()
    own_buffers, own_pack, own_unpack = SpanMessages._buffers, StateSpec.pack, StateSpec.unpack

    def buffers(self: SpanMessages, actions: Sequence[Action], neighbor: int) -> Iterator[Tensor]:
        return map(held.add, own_buffers(self, actions, neighbor))

    def pack(self: StateSpec, tensors: Sequence[Tensor], device: torch.device) -> Tensor:
        return held.add(own_pack(self, tensors, device))

    def unpack(self: StateSpec, message: Tensor, num_rows: int) -> State:
        return tuple(tensor.clone() for tensor in own_unpack(self, message, num_rows))

    engine = make_engine(MODELS[name](), squared_error, layout, world, seed=1)
    num_rows, num_steps = 4 * layout.micro_batches, 2 * layout.spans
    x = torch.randn(num_steps, num_rows, 8)
    fresh = torch.ones(num_rows, dtype=torch.bool)
    window = Window(num_steps, torch.arange(num_rows), torch.full((num_rows,), num_steps), fresh, x, x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SpanMessages, "_buffers", buffers)
        patch.setattr(StateSpec, "pack", pack)
        patch.setattr(StateSpec, "unpack", unpack)
        engine.step(window, None, 0)
    return held.peak


@pytest.mark.parametrize("spans", [2, 3])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_the_messages_that_are_predicted_are_those_that_a_span_holds(
    name: str, micro_batches: int, spans: int, pools: RankPools
) -> None:
    layout = Layout(spans=spans, micro_batches=micro_batches)
    drawn = profile([kind()] * 4).model_copy(update={"sweeps": find_sweeps(MODELS[name]())})
    load = Workload([[2 * spans] * 4 * micro_batches])
    prediction = predict(CostModel(drawn), load, layout, Cluster(spans))
    held = pools[spans].run(find_held_messages, name, layout)
    for stage, held_bytes in zip(prediction.stages, held, strict=True):
        assert 0.5 * stage.memory.messages <= held_bytes <= stage.memory.messages


def test_the_states_before_and_after_each_sweep_are_kept_until_its_backward() -> None:
    drawn = bidirectional(profile([kind(saved=0.0, output_bytes=0.0)] * 3))
    for layout in (Layout(spans=2), Layout(spans=2, recompute=True)):
        prediction = predict(CostModel(drawn), LOAD, layout, Cluster(2))
        # 3 layers of two sweeps; 8 rows; 16 bytes per row.
        assert [stage.memory.activations for stage in prediction.stages] == pytest.approx([6 * 2 * 8 * 16] * 2)
