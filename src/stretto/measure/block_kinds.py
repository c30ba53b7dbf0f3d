"""Kinds: what each kind of block costs, forward and backward, at a few numbers of rows and steps."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stretto.base.denormals import flush_denormals
from stretto.base.errors import PlanError
from stretto.base.optimizer import OptimizerFactory
from stretto.base.window import Rows, Window
from stretto.blocks.initialize import initialize
from stretto.blocks.losses import Loss
from stretto.blocks.stack import Stack
from stretto.engine.engine import window_tensor
from stretto.measure.timing import fastest_times, synchronized_time
from stretto.plan.profile import BlockKind, CostPoint

# A point that would take longer than this is not measured.
_MAX_SECONDS = 6.0
# For each point, twice.
_SECONDS = 0.1


@dataclass(frozen=True)
class ProfiledModel:
    """What is measured: a model on the meta device, its loss, and a global batch of its data."""

    model: Stack
    loss: Loss
    window: Window
    device: torch.device
    seed: int = 1
    is_bf16: bool = False

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.is_bf16)

    def grid(self) -> tuple[list[int], list[int]]:
        """Return the rows and steps to measure at: all of the batch, and parts of it."""
        rows, steps = self.window.num_rows, self.window.num_steps
        return _parts(rows, (1, 2, 4, 16)), _parts(steps, (1, 4, 16))


def _parts(whole: int, divisors: tuple[int, ...]) -> list[int]:
    return sorted({max(1, whole // divisor) for divisor in divisors})


def name_kinds(model: Stack) -> list[str]:
    """Return a name for each block: blocks of the same make and shapes have the same."""
    names: dict[str, str] = {}
    found = []
    for block in model:
        made = f"{block}{[(name, tuple(weight.shape)) for name, weight in block.named_parameters()]}"
        if made not in names:
            count = sum(known.split("-")[0] == type(block).__name__.lower() for known in names.values())
            names[made] = f"{type(block).__name__.lower()}{f'-{count + 1}' if count else ''}"
        found.append(names[made])
    return found


def measure_kinds(
    profiled: ProfiledModel, make_optimizer: OptimizerFactory, memory_limit: float
) -> Iterator[tuple[str, BlockKind]]:
    """Measure each kind of block once, then the loss, which is named `loss`; none that needs more than `memory_limit` bytes."""
    edge = window_tensor(profiled.window, "inputs", profiled.model.dtype)
    # What a kind gives for one step of one row, which is all that the next block's shapes depend on.
    given: dict[str, Tensor] = {}
    names = name_kinds(profiled.model)
    for index, name in enumerate(names):
        if name not in given:
            stack = _initialize_block(profiled, index)
            # Only the first block of all has no use for a gradient of what goes in.
            needs_gradient = index > 0 or names.count(name) > 1
            yield (
                name,
                _measure_block(
                    profiled, stack, edge, make_optimizer, needs_gradient=needs_gradient, memory_limit=memory_limit
                ),
            )
            with torch.no_grad(), profiled.autocast():
                given[name] = stack(edge[:1, :1].to(profiled.device), stack.begin(_rows(profiled, 1, 1)))[0]
        edge = given[name]
    yield "loss", _measure_loss(profiled, edge, memory_limit)


def _initialize_block(profiled: ProfiledModel, index: int) -> Stack:
    stack = copy.deepcopy(profiled.model[index : index + 1])
    return initialize(stack, profiled.seed, profiled.device).train()


def _rows(profiled: ProfiledModel, rows: int, steps: int) -> Rows:
    return Rows.of(rows, steps, device=profiled.device, dtype=profiled.model.dtype)


def _measure_block(
    profiled: ProfiledModel,
    stack: Stack,
    edge: Tensor,
    make_optimizer: OptimizerFactory,
    *,
    needs_gradient: bool,
    memory_limit: float,
) -> BlockKind:
    device = profiled.device
    is_given = edge.shape[:2] == (profiled.window.num_steps, profiled.window.num_rows)
    output_bytes = 0

    def at(rows: int, steps: int) -> Callable[[], tuple[float, float]]:
        nonlocal output_bytes
        x = edge[:steps, :rows].to(device) if is_given else _random_input(edge, rows, steps)
        if needs_gradient and x.is_floating_point():
            x.requires_grad_()
        with torch.no_grad():
            begun = stack.begin(_rows(profiled, rows, steps))
        state = tuple(t.detach().requires_grad_(t.is_floating_point()) for t in begun)
        ones: list[Tensor] = []

        def once() -> tuple[float, float]:
            nonlocal output_bytes
            stack.zero_grad(set_to_none=True)
            started = synchronized_time(device)
            with profiled.autocast():
                y, after = stack(x, state)
            forward = synchronized_time(device)
            outputs = [tensor for tensor in (y, *after) if tensor.requires_grad]
            if not ones:
                ones.extend(torch.ones_like(tensor) for tensor in outputs)
                output_bytes = y.element_size() * y[0, 0].numel()
            middle = synchronized_time(device)
            if outputs:
                torch.autograd.backward(outputs, ones)
            x.grad = None
            return forward - started, synchronized_time(device) - middle

        return once

    points = _measure_grid(profiled, at, stack, memory_limit)
    weights = [weight for weight in stack.parameters() if weight.requires_grad]
    state = stack.begin(_rows(profiled, 1, 1))
    return BlockKind(
        weight_bytes=sum(weight.nbytes for weight in stack.parameters()),
        output_bytes=output_bytes,
        state_bytes=sum(tensor.nbytes for tensor in state),
        accumulate=_time_accumulate(weights, device),
        optimizer=_time_optimizer(weights, make_optimizer, device),
        points=points,
    )


def _measure_loss(profiled: ProfiledModel, edge: Tensor, memory_limit: float) -> BlockKind:
    targets = window_tensor(profiled.window, "targets")

    def at(rows: int, steps: int) -> Callable[[], tuple[float, float]]:
        y = _random_input(edge, rows, steps).requires_grad_()
        asked = targets[:steps, :rows].to(profiled.device)

        def once() -> tuple[float, float]:
            y.grad = None
            started = synchronized_time(profiled.device)
            total = profiled.loss(y, asked).total
            forward = synchronized_time(profiled.device)
            total.backward()  # type: ignore[no-untyped-call]
            return forward - started, synchronized_time(profiled.device) - forward

        return once

    return BlockKind(points=_measure_grid(profiled, at, None, memory_limit))


@flush_denormals()
def _measure_grid(
    profiled: ProfiledModel,
    at: Callable[[int, int], Callable[[], tuple[float, float]]],
    stack: Stack | None,
    memory_limit: float,
) -> tuple[CostPoint, ...]:
    """Measure a block at the points of the grid, from the smallest up to what takes too long or too much memory."""
    rows_grid, steps_grid = profiled.grid()
    points: dict[tuple[int, int], CostPoint] = {}
    # Twice, some seconds apart: what slowed the machine down for a while is not there both times.
    for _ in range(2):
        for rows in rows_grid:
            known = dict(points)
            for steps in steps_grid:
                found = _measure_point(at, rows, steps, stack, known, memory_limit)
                if found is None:
                    break
                known[rows, steps] = found
            if rows == rows_grid[0]:
                # Not even the fewest rows can be measured for longer.
                steps_grid = [steps for steps in steps_grid if (rows, steps) in known]
            elif any((rows, steps) not in known for steps in steps_grid):
                # Beyond this, costs grow in proportion. A row of points is kept whole or not at all.
                rows_grid = [fewer for fewer in rows_grid if fewer < rows]
                break
            points = known
    if not points:
        raise PlanError("a chunk of one step doesn't fit into memory; make the model or the batch smaller")
    return tuple(points.values())


def _measure_point(
    at: Callable[[int, int], Callable[[], tuple[float, float]]],
    rows: int,
    steps: int,
    stack: Stack | None,
    points: dict[tuple[int, int], CostPoint],
    memory_limit: float,
) -> CostPoint | None:
    """Measure one point, the least of what it took before and now; none if it would take too long or too much room."""
    before = points.get((rows, steps))
    smaller = max(points.values(), key=lambda point: point.rows * point.steps, default=None)
    if before is None and smaller is not None:
        times = rows * steps / (smaller.rows * smaller.steps)
        # What is kept, what goes in and out, and their gradients.
        if 4 * smaller.saved * times > memory_limit or (smaller.forward + smaller.backward) * times > _MAX_SECONDS:
            return None
    try:
        once = at(rows, steps)
        saved = _saved_bytes(once, stack)
        forward, backward = fastest_times(once, _SECONDS)
    except torch.OutOfMemoryError:
        return None
    if before is not None:
        forward, backward = min(forward, before.forward), min(backward, before.backward)
    return CostPoint(rows=rows, steps=steps, forward=forward, backward=backward, saved=saved)


def _random_input(edge: Tensor, rows: int, steps: int) -> Tensor:
    """Something like what a block is given: noise of the shape that its neighbour gives."""
    shape = (steps, rows, *edge.shape[2:])
    if edge.is_floating_point():
        return torch.randn(shape, dtype=torch.float32, device=edge.device).to(edge.dtype)
    return edge[:1, :1].expand(shape).contiguous()


def _saved_bytes(run: Callable[[], object], stack: Stack | None) -> float:
    """Count the bytes that a forward keeps for its backward, weights aside."""
    held = set() if stack is None else {weight.untyped_storage().data_ptr() for weight in stack.parameters()}
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return float(sum(seen.values()))


def _time_accumulate(weights: list[nn.Parameter], device: torch.device) -> float:
    if not weights:
        return 0.0
    gradients = [torch.ones_like(weight) for weight in weights]
    others = [torch.ones_like(weight) for weight in weights]

    def once() -> tuple[float]:
        started = synchronized_time(device)
        for gradient, other in zip(gradients, others, strict=True):
            gradient.add_(other)
        return (synchronized_time(device) - started,)

    return fastest_times(once)[0]


def _time_optimizer(weights: list[nn.Parameter], make_optimizer: OptimizerFactory, device: torch.device) -> float:
    """Time what happens between gradients and new weights: their norm, their scaling, the optimizer's step."""
    if not weights:
        return 0.0
    optimizer = make_optimizer(weights)
    gradients = [torch.full_like(weight, 1e-6) for weight in weights]
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient

    def once() -> tuple[float]:
        started = synchronized_time(device)
        float(torch.nn.utils.get_total_norm(gradients))
        torch._foreach_mul_(gradients, 1.0)
        with flush_denormals():
            optimizer.step()
        return (synchronized_time(device) - started,)

    seconds = fastest_times(once)[0]
    for weight in weights:
        weight.grad = None
    return seconds
