"""Measures each kind of block, forward and backward, for several numbers of rows and time steps."""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from stretto.base.denormals import flush_denormals
from stretto.base.errors import PlanError
from stretto.base.foreach import multiply_all
from stretto.base.optimizer import OptimizerFactory
from stretto.base.state import State
from stretto.base.window import Rows
from stretto.blocks.cast_weights import CastWeights
from stretto.blocks.fused import FusedStack, find_fused, fused_runs
from stretto.blocks.initialize import initialize
from stretto.blocks.row_loss import RowLoss, call_row_loss
from stretto.blocks.stack import Stack
from stretto.engine.engine import window_tensor
from stretto.engine.precision import compute_dtype
from stretto.measure.profile_input import ProfileInput
from stretto.measure.timing import fastest_time, fastest_times, synchronized_time
from stretto.plan.profile import CostPoint, KindCosts

Trial = Callable[[], tuple[float, float]]
"""Runs a forward and a backward once and returns how long each took, in seconds."""

# A point (a number of rows and a number of time steps) is not measured if one run would take longer than this.
_MAX_RUN_SECONDS = 6.0
# How long `fastest_times` repeats the runs of each point, in each of two passes.
_POINT_SECONDS = 0.1
# Points are measured at the global batch's rows and steps divided by these. An error message contains the 16.
_ROW_DIVISORS, _STEP_DIVISORS = (1, 2, 4, 16), (1, 4, 16)

# A longer fused run is measured as a run of this many blocks.
_MAX_FUSED_BLOCKS = 8


def name_kinds(model: Stack) -> list[str]:
    """Return each block's kind: `lstm`, then `lstm-2` for an LSTM with other settings or shapes."""
    kind_of: dict[str, str] = {}  # by signature
    kinds, signature = [], ""
    for block in model:
        weights = [(name, tuple(weight.shape)) for name, weight in block.named_parameters()]
        # The features of a block without weights, such as dropout, are those of the block before it.
        signature = f"{block}{weights}" if weights else f"{block} after {signature}"
        if signature not in kind_of:
            class_name = type(block).__name__.lower()
            count = sum(kind.split("-")[0] == class_name for kind in kind_of.values())
            kind_of[signature] = f"{class_name}-{count + 1}" if count else class_name
        kinds.append(kind_of[signature])
    return kinds


def measure_kinds(profile_input: ProfileInput, memory_limit: float) -> Iterator[tuple[str, KindCosts]]:
    """Measure each kind of block, then the loss; yield names and costs. Skip points above `memory_limit` bytes."""
    model = profile_input.model
    inputs = window_tensor(profile_input.window, "inputs", model.dtype)
    # The output of each kind for one time step of one row: the example input of the block after it.
    outputs: dict[str, Tensor] = {}
    names = name_kinds(model)
    for index, name in enumerate(names):
        if name not in outputs:
            stack = _initialized_part(profile_input, slice(index, index + 1))
            # The model's first block needs no gradient w.r.t. its input, but later blocks of its kind, if any, do.
            needs_input_gradient = index > 0 or names.count(name) > 1
            block = _MeasuredBlock(profile_input, stack.train(), inputs, needs_input_gradient)
            points = _measure_grid(profile_input, block.trial, block.weights, memory_limit)
            outputs[name] = block.output()
            yield name, _kind_costs(block, outputs[name], points)
        inputs = outputs[name]
    yield "loss", _measure_loss(profile_input, inputs, memory_limit)


def measure_fused_kinds(
    profile_input: ProfileInput, kinds: Mapping[str, KindCosts], memory_limit: float
) -> dict[str, KindCosts]:
    """Return the kinds of blocks that can run in one call with the block before them, with `fused_points` measured."""
    names, blocks = name_kinds(profile_input.model), list(profile_input.model)
    runs = fused_runs(len(blocks), find_fused(blocks))
    # The longest run of each kind; the first block of a run is not fused with the block before it.
    longest = {
        name: run
        for run in sorted(runs, key=lambda run: run.stop - run.start)
        for name in names[run.start + 1 : run.stop]
    }
    fused = {}
    for name, run in longest.items():
        measured = slice(run.start, min(run.stop, run.start + _MAX_FUSED_BLOCKS))
        whole = _measure_run(profile_input, measured, memory_limit)
        run_points = [kinds[kind_name].points for kind_name in names[measured]]
        fused[name] = kinds[name].model_copy(update={"fused_points": _fused_points(kinds[name], run_points, whole)})
    return fused


def _initialized_part(profile_input: ProfileInput, part: slice) -> Stack:
    """Return a copy of some blocks of the model on the device, with initial weights."""
    model = profile_input.model
    return initialize(copy.deepcopy(model[part]), profile_input.seed, profile_input.device, model=model)


def _measure_run(profile_input: ProfileInput, run: slice, memory_limit: float) -> tuple[CostPoint, ...]:
    """Measure a fused run of blocks as a whole."""
    stack = _initialized_part(profile_input, run).train()
    cell = next(module for module in stack.modules() if isinstance(module, nn.RNNBase))
    example = torch.zeros(1, 1, cell.input_size, dtype=stack.dtype, device=profile_input.device)
    block = _MeasuredBlock(profile_input, stack, example, needs_input_gradient=True)
    return _measure_grid(profile_input, block.trial, block.weights, memory_limit)


def _fused_points(
    kind: KindCosts, run: Sequence[tuple[CostPoint, ...]], whole: tuple[CostPoint, ...]
) -> tuple[CostPoint, ...]:
    """Return what a block of a kind adds to the block before it: at most what it costs alone.

    `run` has the points of each block of a run by itself, and `whole` those of all in one call. What the blocks after
    the first add is shared in proportion to their own costs. Points that are too large to be measured are left out.
    """
    by_size = [{(point.rows, point.steps): point for point in points} for points in (*run, whole)]
    shared_sizes = set.intersection(*map(set, by_size))

    def fused_point(point: CostPoint) -> CostPoint:
        first, *further, together = (points[point.rows, point.steps] for points in by_size)
        costs = {}
        for field in ("forward", "backward", "saved"):
            added = getattr(together, field) - getattr(first, field)
            alone = sum(getattr(block, field) for block in further)
            costs[field] = getattr(point, field) * min(max(added / alone, 0.0), 1.0) if alone else 0.0
        return point.model_copy(update=costs)

    return tuple(fused_point(point) for point in kind.points if (point.rows, point.steps) in shared_sizes)


@dataclass(frozen=True)
class _MeasuredBlock:
    """Blocks and an example input: the whole batch, or the previous block's output for one time step of one row."""

    profile_input: ProfileInput
    stack: Stack  # one block, or a fused run
    example: Tensor
    needs_input_gradient: bool

    @cached_property
    def _fused_stack(self) -> FusedStack:
        return FusedStack(self.stack)

    @cached_property
    def _cast_weights(self) -> CastWeights:
        return CastWeights(self._fused_stack.rnns, compute_dtype(self.profile_input.precision))

    @property
    def weights(self) -> list[Tensor]:
        """The weights, and their copies in half precision: one each, however many chunks there are."""
        return [*self.stack.parameters(), *self._cast_weights.copies]

    @property
    def cast_bytes(self) -> int:
        """Bytes of the copies in half precision, and of the sums of their gradients in the weights' own dtype."""
        itemsize = self.profile_input.model.dtype.itemsize
        return sum(weight.nbytes + weight.numel() * itemsize for weight in self._cast_weights.copies)

    def trial(self, rows: int, steps: int) -> Trial:
        """Return a trial of one chunk of `rows` rows and `steps` time steps."""
        window = self.profile_input.window
        if self.example.shape[:2] == (window.num_steps, window.num_rows):
            x = self.example[:steps, :rows].to(self.profile_input.device)
        else:
            x = _random_input(self.example, rows, steps)
        if self.needs_input_gradient and x.is_floating_point():
            x.requires_grad_()
        with torch.no_grad():
            initial_state = self._initial_state(rows, steps)
        state = tuple(tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in initial_state)
        device = self.profile_input.device

        def run() -> tuple[float, float]:
            self.stack.zero_grad(set_to_none=True)
            x.grad = None
            with self._cast_weights.for_step():
                started = synchronized_time(device)
                with self.profile_input.autocast():
                    y, next_state = self._fused_stack(x, state)
                forward_seconds = synchronized_time(device) - started
            outputs = [tensor for tensor in (y, *next_state) if tensor.requires_grad]
            gradients = [torch.ones_like(tensor) for tensor in outputs]
            started = synchronized_time(device)
            if outputs:
                torch.autograd.backward(outputs, gradients)
            return forward_seconds, synchronized_time(device) - started

        return run

    def output(self) -> Tensor:
        """Return the output for one time step of one row."""
        with torch.no_grad(), self.profile_input.autocast():
            return self.stack(self.example[:1, :1].to(self.profile_input.device), self._initial_state(1, 1))[0]

    def _initial_state(self, rows: int, steps: int) -> State:
        device, dtype = self.profile_input.device, self.profile_input.model.dtype
        return self.stack.begin(Rows.of(rows, steps, device=device, dtype=dtype))


def _measure_loss(profile_input: ProfileInput, output: Tensor, memory_limit: float) -> KindCosts:
    loss = profile_input.make_loss()

    def trial(rows: int, steps: int) -> Trial:
        y = _random_input(output, rows, steps).requires_grad_()
        device, targets = y.device, profile_input.crop_targets(rows, steps)
        # A loss over whole rows is measured on rows of as many time steps: its cost is about the same for each of them.
        lengths = profile_input.window.lengths[:rows].clamp(max=steps)
        targets = targets if isinstance(loss, RowLoss) else targets.to(device)

        def run() -> tuple[float, float]:
            y.grad = None
            started = synchronized_time(device)
            result = call_row_loss(loss, y, targets, lengths) if isinstance(loss, RowLoss) else loss(y, targets)
            total = result.total
            forward_stopped = synchronized_time(device)
            if total.requires_grad:  # not if no row has a target
                total.backward()  # type: ignore[no-untyped-call]
            return forward_stopped - started, synchronized_time(device) - forward_stopped

        return run

    return KindCosts(points=_measure_grid(profile_input, trial, (), memory_limit))


def _kind_costs(block: _MeasuredBlock, output: Tensor, points: tuple[CostPoint, ...]) -> KindCosts:
    profile_input, stack = block.profile_input, block.stack
    device = profile_input.device
    trainable = [weight for weight in stack.parameters() if weight.requires_grad]
    state = stack.begin(Rows.of(1, 1, device=device, dtype=profile_input.model.dtype))
    return KindCosts(
        weight_bytes=sum(weight.nbytes for weight in stack.parameters()),
        cast_bytes=block.cast_bytes,
        stride=stack.stride,
        output_bytes=output.element_size() * output[0, 0].numel(),
        state_bytes=sum(tensor.nbytes for tensor in state),
        accumulate=_time_accumulate(trainable, device) if trainable else 0.0,
        optimizer=_time_optimizer(trainable, profile_input.make_optimizer, device) if trainable else 0.0,
        points=points,
    )


@flush_denormals()
def _measure_grid(
    profile_input: ProfileInput,
    make_trial: Callable[[int, int], Trial],
    weights: Collection[Tensor],
    memory_limit: float,
) -> tuple[CostPoint, ...]:
    """Measure points from small to large, and stop before those that take too long or too much memory."""
    window = profile_input.window
    rows_grid, steps_grid = _fractions(window.num_rows, _ROW_DIVISORS), _fractions(window.num_steps, _STEP_DIVISORS)
    points: dict[tuple[int, int], CostPoint] = {}
    # Twice, some time apart: a temporary slowdown of the machine rarely hits both passes.
    for _ in range(2):
        for rows in rows_grid:
            measured = dict(points)
            for steps in steps_grid:
                earlier = measured.get((rows, steps))
                if earlier is None and _is_too_large(rows, steps, measured, memory_limit):
                    break
                point = _measure_point(make_trial, rows, steps, weights, earlier)
                if point is None:
                    break
                measured[rows, steps] = point
            if rows == rows_grid[0]:
                # The smallest number of rows decides which numbers of steps are measured.
                steps_grid = [steps for steps in steps_grid if (rows, steps) in measured]
            elif any((rows, steps) not in measured for steps in steps_grid):
                # The grid must stay rectangular, so drop this number of rows and larger ones; costs are extrapolated.
                rows_grid = [fewer for fewer in rows_grid if fewer < rows]
                break
            points = measured
    if not points:
        raise PlanError("1/16 of the rows and of the time steps don't fit in memory; use a smaller model or batch")
    return tuple(points.values())


def _fractions(whole: int, divisors: tuple[int, ...]) -> list[int]:
    return sorted({max(1, whole // divisor) for divisor in divisors})


def _is_too_large(rows: int, steps: int, points: dict[tuple[int, int], CostPoint], memory_limit: float) -> bool:
    """Return whether a point would take too long or too much memory, extrapolated from those measured."""
    if not points:
        return False

    def ratio(point: CostPoint) -> float:
        return rows * steps / (point.rows * point.steps)

    largest = max(points.values(), key=lambda point: point.rows * point.steps)
    # Each point gives an upper bound, as a larger chunk costs less per time step. The lowest bound counts: the machine
    # may have been slow for a moment while the others were measured.
    seconds = min((point.forward + point.backward) * ratio(point) for point in points.values())
    # The factor of 4 leaves room for inputs and outputs, and for the gradients of all of these.
    return 4 * largest.saved * ratio(largest) > memory_limit or seconds > _MAX_RUN_SECONDS


def _measure_point(
    make_trial: Callable[[int, int], Trial],
    rows: int,
    steps: int,
    weights: Collection[Tensor],
    earlier: CostPoint | None,
) -> CostPoint | None:
    """Measure one point; return the shorter times of this and an earlier measurement; None if memory runs out."""
    try:
        trial = make_trial(rows, steps)
        saved = _saved_bytes(trial, weights)
        forward, backward = fastest_times(trial, _POINT_SECONDS)
    except torch.OutOfMemoryError:
        return None
    if earlier is not None:
        forward, backward = min(forward, earlier.forward), min(backward, earlier.backward)
    return CostPoint(rows=rows, steps=steps, forward=forward, backward=backward, saved=saved)


def _random_input(example: Tensor, rows: int, steps: int) -> Tensor:
    """Return noise with the dtype and the features of `example`; for token ids, copies of its first one."""
    shape = (steps, rows, *example.shape[2:])
    if example.is_floating_point():
        return torch.randn(shape, dtype=torch.float32, device=example.device).to(example.dtype)
    return example[:1, :1].expand(shape).contiguous()


def _saved_bytes(run: Callable[[], object], weights: Collection[Tensor]) -> float:
    """Return the bytes that a forward saves for its backward, without the weights."""
    weight_pointers = {weight.untyped_storage().data_ptr() for weight in weights}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weight_pointers:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return float(sum(saved.values()))


def _time_accumulate(weights: list[nn.Parameter], device: torch.device) -> float:
    """Return how long gradient accumulation takes, in seconds: adding one gradient of each weight to another."""
    gradients = [torch.ones_like(weight) for weight in weights]
    others = [torch.ones_like(weight) for weight in weights]

    def accumulate() -> None:
        for gradient, other in zip(gradients, others, strict=True):
            gradient.add_(other)

    return fastest_time(accumulate, device)


def _time_optimizer(weights: list[nn.Parameter], make_optimizer: OptimizerFactory, device: torch.device) -> float:
    """Return how long a weight update takes, in seconds: gradient norm, gradient scaling and optimizer step."""
    optimizer = make_optimizer(weights)
    gradients = [torch.full_like(weight, 1e-6) for weight in weights]
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient

    def update() -> None:
        float(torch.nn.utils.get_total_norm(gradients))  # float waits for the device, as in training
        multiply_all(gradients, 1.0)
        with flush_denormals():
            optimizer.step()

    seconds = fastest_time(update, device)
    for weight in weights:
        weight.grad = None
    return seconds
