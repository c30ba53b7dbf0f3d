"""verify: checks that a few training steps in a layout give the same result as on one rank, block by block."""

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.base.errors import ConfigError, LawError
from stretto.base.keys import derive_key
from stretto.base.position import Position
from stretto.base.state import State
from stretto.base.tf32 import use_tf32
from stretto.base.window import IGNORE_INDEX, Rows, Window
from stretto.blocks.check_widths import ModelInput, check_inputs
from stretto.blocks.initialize import initialize
from stretto.blocks.loss_weights import attach_loss
from stretto.blocks.losses import Loss
from stretto.blocks.row_loss import RowLoss
from stretto.blocks.stack import Stack
from stretto.config.layout import Layout
from stretto.engine.build import make_engine, stage_parts
from stretto.engine.engine import window_tensor
from stretto.engine.gather import gather_model_tensors
from stretto.engine.local import LocalEngine
from stretto.engine.pipeline import PipelineEngine
from stretto.engine.precision import Precision
from stretto.engine.replica import ReplicaEngine
from stretto.engine.strided_targets import stride_targets
from stretto.measure.laws import check_chunk_law, check_loss
from stretto.mesh.world import World
from stretto.windows.loader import WindowSource

# Layouts sum in different orders; these tolerances allow for rounding errors in sums over many time steps and rows.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
# bf16 has 8 significant bits and fp16 has 11. States are rounded after each chunk: allow 8 times the rounding error.
REDUCED_TOLERANCES = {"bf16": 8 * 2**-8, "fp16": 8 * 2**-11}


@dataclass(frozen=True)
class BlockDifference:
    """The largest relative differences between a block's gradients and state in the layout and those on one rank."""

    index: int
    name: str
    gradients: float
    state: float  # NaN if it was not compared

    @property
    def max_difference(self) -> float:
        return self.gradients if math.isnan(self.state) else max(self.gradients, self.state)


@dataclass(frozen=True)
class Verification:
    """The largest differences over some training steps, the tolerance, and the laws that are broken."""

    layout: Layout
    num_steps: int  # training steps
    loss: float  # relative difference
    blocks: tuple[BlockDifference, ...]
    tolerance: float
    violations: tuple[str, ...]  # one sentence for each block, or the loss, that breaks a law

    @property
    def is_equal(self) -> bool:
        differences = [self.loss, *(block.max_difference for block in self.blocks)]
        return not self.violations and all(difference <= self.tolerance for difference in differences)

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        if self.violations:
            return "; ".join(self.violations)
        if self.is_equal:
            has_states = not any(math.isnan(block.state) for block in self.blocks)
            parts = "loss, gradients and states" if has_states else "loss and gradients; spans return no state"
            return f"equal to the unsplit step on one rank, within {self.tolerance:.0e}, in {parts}"
        block = max(self.blocks, key=lambda block: block.max_difference)
        is_in_block = block.max_difference > self.tolerance
        where = f"most in block {block.index} ({block.name})" if is_in_block else "in the loss"
        return f"differs from the step on one rank, {where}, though no block breaks the chunk law and the loss is a sum"


@use_tf32(False)
def verify(
    model: Stack,
    loss: Loss,
    windows: WindowSource,
    layout: Layout,
    world: World | None = None,
    *,
    seed: int = 1,
    num_steps: int = 3,
    precision: Precision = "fp32",
) -> Verification:
    """Compare `num_steps` training steps in a layout with the same steps on one rank; all ranks must call this.

    `model` may be on the meta device; its weights are initialized with `seed` and never updated. It runs in its own
    dtype: `model.double()` is the most sensitive check. `verify` also checks the chunk law for each causal block, and
    that the loss is a sum, so that the verdict can name the cause of a difference. By default, `world` is one CPU rank.
    TF32 is off meanwhile: its rounding would exceed the tolerance.
    """
    if num_steps < 1:
        raise ConfigError(f"num_steps={num_steps} compares nothing; use at least 1")
    check_inputs(ModelInput.of(model), windows.task)
    world = world or World(rank=0, size=1, device=torch.device("cpu"))
    # Together, because a loss that has weights may be part of the model already; a copy leaves the user's as they are.
    model, loss = copy.deepcopy((model, loss))
    model = attach_loss(model, loss)
    engine = make_engine(*copy.deepcopy((model, loss)), layout, world, seed=seed, precision=precision)
    parallel = _ParallelRun(engine, model, windows, layout)
    # Rank 0 also runs the whole model by itself, and compares.
    single = None
    if world.is_rank_zero:
        single = _SingleRun(*_initialized_copy(model, loss, seed, world), windows, precision)
    # [loss, gradients of its weights], then [gradients, state] of each block
    differences = torch.zeros(len(model) + 1, 2)
    position = Position()
    for step in range(num_steps):
        key = derive_key(seed, "step", step)
        actual = parallel.step(position, key)
        if single is not None:
            expected = single.step(position, key)
            differences = torch.maximum(differences, torch.tensor(actual.differences(expected)))
        position = windows.next_position(position)
    violations = [] if single is None else _find_violations(*_initialized_copy(model, loss, seed, world), windows)
    # The other ranks have differences of zero, so the sums are rank 0's differences.
    sums = world.all_reduce(differences.flatten().tolist())
    sentences = world.broadcast_text("\n".join(violations))
    blocks = [
        BlockDifference(model.first + index, type(block).__name__, sums[2 * index + 2], sums[2 * index + 3])
        for index, block in enumerate(model)
    ]
    tolerance = REDUCED_TOLERANCES.get(precision) or TOLERANCES.get(model.dtype, 1e-4)
    return Verification(layout, num_steps, max(sums[:2]), tuple(blocks), tolerance, tuple(sentences.splitlines()))


@dataclass(frozen=True)
class _StepTensors:
    """The mean loss, the gradients and the states after one training step, with all rows of the batch in order."""

    mean_loss: float
    gradients: dict[str, Tensor]  # by parameter name
    states: dict[int, State]  # by block index; spans return none

    def differences(self, expected: "_StepTensors") -> list[list[float]]:
        """Return differences: [loss, gradients of its weights], then [gradients, state] of each block."""
        loss = abs(self.mean_loss - expected.mean_loss) / max(abs(expected.mean_loss), 1e-12)
        pairs = [[loss, self._gradient_difference(expected, "loss.")]]
        for index in expected.states:
            gradients = self._gradient_difference(expected, f"blocks.{index}.")
            pairs.append([gradients, self._state_difference(expected, index)])
        return pairs

    def _state_difference(self, expected: "_StepTensors", index: int) -> float:
        """Return the difference of a block's state; NaN if there is none to compare."""
        if not self.states:
            return math.nan
        tensor_pairs = zip(self.states[index], expected.states[index], strict=True)
        return max((_difference(*tensors) for tensors in tensor_pairs), default=0.0)

    def _gradient_difference(self, expected: "_StepTensors", prefix: str) -> float:
        names = [name for name in expected.gradients if name.startswith(prefix)]
        return max((_difference(self.gradients[name], expected.gradients[name]) for name in names), default=0.0)


class _SingleRun:
    """The model on one rank, with the whole batch."""

    def __init__(self, model: Stack, loss: Loss, windows: WindowSource, precision: Precision) -> None:
        self.engine = LocalEngine(model, loss, precision=precision)
        self.windows = windows
        self.state: State | None = None

    def step(self, position: Position, key: int) -> _StepTensors:
        window = self.windows.read(position)
        result = self.engine.step(window, self.state, key)
        self.state = result.state
        rows = _continuing_rows(window)
        compared = tuple(tensor[rows.to(tensor.device)] for tensor in result.state)
        mean_loss = float(result.total) / max(float(result.count), 1)
        return _StepTensors(mean_loss, _gradients(self.engine.stack), _states_by_block(self.engine.stack, compared))


class _ParallelRun:
    """The model in the layout; every rank runs its part and gathers the results of all."""

    def __init__(
        self, engine: PipelineEngine | ReplicaEngine, model: Stack, windows: WindowSource, layout: Layout
    ) -> None:
        self.engine, self.model, self.windows = engine, model, windows
        self.parts = stage_parts(model, layout)
        self.shares = [windows.share(i, layout.replicas, min_rows=layout.micro_batches) for i in range(layout.replicas)]
        self.state: State | None = None

    def step(self, position: Position, key: int) -> _StepTensors:
        engine = self.engine
        window = self.shares[engine.mesh.replica].read(
            position, inputs=engine.reads_inputs, targets=engine.reads_targets
        )
        result = engine.step(window, self.state, key)
        self.state = result.state
        total, count = engine.mesh.world.all_reduce([float(result.total), float(result.count)])  # 0 on earlier stages
        gradients = gather_model_tensors(
            self.model, self.parts, _gradients(engine.stack), engine.mesh, split_blocks=tuple(engine.stack.shards)
        )
        states = self._gather_states(result.state, position) if engine.mesh.num_spans == 1 else {}
        return _StepTensors(total / max(count, 1), gradients, states)

    def _gather_states(self, state: State, position: Position) -> dict[int, State]:
        """Return each block's state for all rows of the batch, from the stages and replicas that hold them."""
        mesh = self.engine.mesh
        lanes = [share.read(position, inputs=False, targets=False).lanes for share in self.shares]
        # The rows in their order on one rank, found by their lane numbers; blank rows don't exist there.
        numbers, places = torch.cat(lanes).sort()
        window = self.windows.read(position, inputs=False, targets=False)
        order = places[torch.searchsorted(numbers, window.lanes[_continuing_rows(window)])]
        states: dict[int, State] = {}
        first: dict[int, int] = {}  # by stage: its number of tensors in the parts so far
        for index, part in enumerate(self.parts):
            stage, replica_states = index % mesh.num_stages, []
            start = first.get(stage, 0)
            first[stage] = start + len(self.model[part].initial_state(Rows.of(0)))
            for replica in range(mesh.num_replicas):
                is_here = (mesh.replica, mesh.stage) == (replica, stage)
                rows = Rows.of(len(lanes[replica]), dtype=self.model.dtype)
                tensors = (
                    state[start : first[stage]] if is_here else self.model[part].initial_state(rows)
                )  # else buffers to receive into
                source = mesh.topology.rank(replica, stage)
                replica_states.append([mesh.world.broadcast(t.to(mesh.world.device), source).cpu() for t in tensors])
            ordered = tuple(torch.cat(tensors)[order] for tensors in zip(*replica_states, strict=True))
            states |= _states_by_block(self.model[part], ordered)
        return states


def _initialized_copy(model: Stack, loss: Loss, seed: int, world: World) -> tuple[Stack, Loss]:
    model, loss = copy.deepcopy((model, loss))
    return initialize(model, seed, world.device), loss


def _continuing_rows(window: Window) -> Tensor:
    """Return which rows have a state after the window.

    That of a row that ends before is discarded; in a replica's window, which may be shorter, it may not yet be.
    """
    return (window.lengths >= window.num_steps).nonzero().flatten()


def _states_by_block(stack: Stack, state: State) -> dict[int, State]:
    return dict(zip(stack.indices, stack.split_state(state), strict=True))


def _gradients(stack: Stack) -> dict[str, Tensor]:
    """Return the gradients by parameter name; those of a tied one by each of its names, to compare all copies of it."""
    named_parameters = stack.named_parameters(remove_duplicate=False)
    return {name: parameter.grad for name, parameter in named_parameters if parameter.grad is not None}


def _difference(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest expected value; 1 if integers differ, infinite for NaN."""
    expected = expected.to(actual.device)
    if not actual.is_floating_point():
        return 0.0 if torch.equal(actual, expected) else 1.0
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    # If all expected values are zero, there is no scale: return a sum (max would fail on an empty tensor).
    difference = float((actual - expected).abs().max()) / max(largest, 1e-12) if largest else float(actual.abs().sum())
    return difference if difference < torch.inf else torch.inf  # also for NaN


def _find_violations(model: Stack, loss: Loss, windows: WindowSource) -> list[str]:
    """Check the laws on a few rows and time steps; return a sentence for each block, or the loss, that breaks one."""
    window = windows.read(Position())
    stride, num_outputs = model.stride, -(-window.num_steps // model.stride)
    rows, steps = slice(0, min(4, window.num_rows)), min(6, num_outputs)  # time steps of the outputs
    targets = window_tensor(window, "targets")[:, rows]
    row_loss = loss if isinstance(loss, RowLoss) else None
    if row_loss is None or row_loss.targets_per_step:
        targets = stride_targets(targets, window.num_steps, stride)
    stop = steps if row_loss is not None else _last_target(targets, steps)
    device = next((parameter.device for parameter in model.parameters()), targets.device)
    x = window_tensor(window, "inputs", model.dtype)[(stop - steps) * stride : stop * stride, rows].to(device)
    violations = []
    model.train()  # as in a training step
    for index, block in enumerate(model, model.first):
        if block.causal and len(x) > block.stride and x.shape[1] > 1:  # the check needs two chunks and 2 rows
            try:
                check_chunk_law(block, x)
            except LawError as error:
                violations.append(f"block {index}: {error}")
        with torch.no_grad():
            x, _ = block(x, block.begin(Rows.of(x.shape[1], len(x), device=x.device, dtype=model.dtype)))
    try:
        if row_loss is not None:
            # Whole rows, of which the blocks have not run all time steps.
            y = torch.randn(num_outputs, x.shape[1], x.shape[-1], dtype=x.dtype, device=device)
            check_loss(row_loss, y, targets, lengths=(-(-window.lengths[rows] // stride)).clamp(max=num_outputs))
        else:
            check_loss(loss, x, targets[stop - steps : stop].to(device))
    except LawError as error:
        violations.append(str(error))
    return violations


def _last_target(targets: Tensor, num_steps: int) -> int:
    """Return where some `num_steps` time steps end, so that the last target is among them."""
    has_target = ~targets.isnan() if targets.is_floating_point() else targets != IGNORE_INDEX
    if not bool(has_target.any()):
        return num_steps
    return max(num_steps, 1 + int(has_target.flatten(1).any(1).nonzero().max()))
