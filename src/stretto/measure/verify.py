"""Verify: do a few steps in a layout give what they give on one rank, block by block? And if not, who is to blame?"""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.base.errors import ConfigError, LawError
from stretto.base.keys import derive_key
from stretto.base.position import Position
from stretto.base.state import State
from stretto.base.window import IGNORE_INDEX, Rows
from stretto.blocks.initialize import initialize
from stretto.blocks.losses import Loss
from stretto.blocks.stack import Stack
from stretto.config.layout import Layout
from stretto.engine.build import make_engine, stage_parts
from stretto.engine.engine import Precision, window_tensor
from stretto.engine.gather import gather_model_tensors
from stretto.engine.local import LocalEngine
from stretto.measure.laws import check_chunk_law, check_loss
from stretto.mesh.mesh import Mesh
from stretto.mesh.world import World
from stretto.windows.loader import WindowSource

# Sums in another order: a few thousand roundings.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
# bf16 keeps eight bits, and rounds a state at each chunk's edge.
BF16_TOLERANCE = 8 * 2**-8


@dataclass(frozen=True)
class BlockDifference:
    """How far one block is from itself on one rank, relative to its largest values."""

    index: int
    name: str
    gradients: float
    state: float

    @property
    def max_difference(self) -> float:
        return max(self.gradients, self.state)


@dataclass(frozen=True)
class Verification:
    """The largest differences over some steps, what they may be, and which laws are broken."""

    layout: Layout
    num_steps: int
    loss: float
    blocks: tuple[BlockDifference, ...]
    tolerance: float
    violations: tuple[str, ...]  # a sentence for each block, or the loss, that breaks a law

    @property
    def is_equal(self) -> bool:
        differences = [self.loss, *(block.max_difference for block in self.blocks)]
        return not self.violations and all(difference <= self.tolerance for difference in differences)

    @property
    def verdict(self) -> str:
        """One sentence."""
        if self.violations:
            return "; ".join(self.violations)
        if self.is_equal:
            return f"equal to one rank, to {self.tolerance:.0e}, in loss, gradients and states"
        block = max(self.blocks, key=lambda found: found.max_difference)
        return f"differs from one rank, most at block {block.index} ({block.name}), though every law holds by itself"


def verify(
    model: Stack,
    loss: Loss,
    data: WindowSource,
    layout: Layout,
    world: World | None = None,
    *,
    seed: int = 1,
    num_steps: int = 3,
    precision: Precision = "fp32",
) -> Verification:
    """Take some steps in a layout and on one rank, and compare; every rank calls it and gets the same answer.

    `model` may be on the meta device; its weights are drawn by `seed`, and stay as they are. It runs in its own dtype:
    `model.double()` gives the sharpest answer. Each block's chunk law and the loss's adding up are checked too, so that
    a difference has a name.
    """
    if num_steps < 1:
        raise ConfigError(f"steps={num_steps} compares nothing; use at least 1")
    world = world or World(0, 1, torch.device("cpu"))
    cut = make_engine(copy.deepcopy(model), loss, layout, world, seed=seed, precision=precision)
    shares = [data.share(replica, layout.replicas, layout.micro_batches) for replica in range(layout.replicas)]
    share = shares[cut.mesh.replica]
    whole = (
        LocalEngine(initialize(copy.deepcopy(model), seed, world.device), loss, precision=precision)
        if world.is_rank_zero
        else None
    )
    parts = stage_parts(model, layout)
    worst = torch.zeros(len(model) + 1, 2)
    cut_state: State | None = None
    whole_state: State | None = None
    position = Position()
    for step in range(num_steps):
        key = derive_key(seed, "step", step)
        window = share.read(position, inputs=cut.needs_inputs, targets=cut.needs_targets)
        outcome = cut.step(window, cut_state, key)
        cut_state = outcome.state
        total, count = cut.all_reduce([float(outcome.total), float(outcome.count)])
        gradients = gather_model_tensors(model, parts, _gradients(cut.stack), cut.mesh)
        lanes = [share.read(position, inputs=False, targets=False).lanes for share in shares]
        states = _gather_states(model, parts, outcome.state, lanes, cut.mesh)
        if whole is not None:
            expected = whole.step(data.read(position), whole_state, key)
            whole_state = expected.state
            mean = float(expected.total) / max(float(expected.count), 1)
            now = [[abs(total / max(count, 1) - mean) / max(abs(mean), 1e-12), 0.0]]
            # The rows of all replicas as one rank has them; blank ones, which it doesn't have, come last.
            order = torch.cat(lanes).argsort()[: len(data.read(position, inputs=False, targets=False).lanes)]
            states = [tuple(tensor[order] for tensor in state) for state in states]
            now += _differences(whole.stack, gradients, states, expected.state)
            worst = torch.maximum(worst, torch.tensor(now))
        position = data.next_position(position)
    broken = (
        []
        if whole is None
        else _find_violations(initialize(copy.deepcopy(model), seed, world.device), loss, data, world.device)
    )
    return _broadcast_result(cut.mesh, model, layout, num_steps, worst, broken, precision)


def _broadcast_result(
    mesh: Mesh, model: Stack, layout: Layout, num_steps: int, worst: Tensor, broken: list[str], precision: Precision
) -> Verification:
    """Give every rank the answer, which only the first has found."""
    sizes = mesh.world.all_reduce(worst.flatten().tolist())
    said = mesh.world.broadcast_text("\n".join(broken))
    blocks = tuple(
        BlockDifference(model.first + index, type(block).__name__, sizes[2 * index + 2], sizes[2 * index + 3])
        for index, block in enumerate(model)
    )
    tolerance = BF16_TOLERANCE if precision == "bf16" else TOLERANCES.get(model.dtype, 1e-4)
    return Verification(layout, num_steps, sizes[0], blocks, tolerance, tuple(said.splitlines()))


def _gradients(stack: Stack) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in stack.named_parameters() if parameter.grad is not None}


def _gather_states(model: Stack, parts: list[slice], state: State, lanes: list[Tensor], mesh: Mesh) -> list[State]:
    """Return each block's state of all rows, from the stages and replicas that hold them."""
    blocks: list[State] = []
    for stage, part in enumerate(parts):
        replicas = []
        for replica in range(mesh.num_replicas):
            rows = Rows.of(len(lanes[replica]), dtype=model.dtype)
            is_here = (mesh.replica, mesh.stage) == (replica, stage)
            tensors = state if is_here else model[part].initial_state(rows)
            source = mesh.topology.rank(replica, stage)
            replicas.append([mesh.world.broadcast(tensor.to(mesh.world.device), source).cpu() for tensor in tensors])
        joined = tuple(torch.cat(tensors) for tensors in zip(*replicas, strict=True))
        blocks += model[part].split_state(joined)
    return blocks


def _differences(whole: Stack, gradients: dict[str, Tensor], states: list[State], expected: State) -> list[list[float]]:
    found = []
    own = _gradients(whole)
    for index, (these, those) in enumerate(zip(states, whole.split_state(expected), strict=True), whole.first):
        names = [name for name in own if name.startswith(f"blocks.{index}.")]
        in_gradients = [_difference(gradients[name], own[name]) for name in names]
        in_state = [_difference(this, that) for this, that in zip(these, those, strict=True)]
        found.append([max(in_gradients, default=0.0), max(in_state, default=0.0)])
    return found


def _difference(found: Tensor, expected: Tensor) -> float:
    expected = expected.to(found.device)
    if not found.is_floating_point():
        return 0.0 if torch.equal(found, expected) else 1.0
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    difference = float((found - expected).abs().max()) / max(largest, 1e-12) if largest else float(found.abs().sum())
    return difference if difference < torch.inf else torch.inf


def _find_violations(model: Stack, loss: Loss, data: WindowSource, device: torch.device) -> list[str]:
    """Check each block, and the loss, on a corner of the user's own data: where something is asked, if anywhere."""
    window = data.read(Position())
    rows, steps = slice(0, min(4, window.num_rows)), min(6, window.num_steps)
    asked = window_tensor(window, "targets")[:, rows]
    is_asked = ~asked.isnan() if asked.is_floating_point() else asked != IGNORE_INDEX
    stop = max(steps, 1 + int(is_asked.flatten(1).any(1).nonzero().max())) if bool(is_asked.any()) else steps
    targets = asked[stop - steps : stop].to(device)
    x = window_tensor(window, "inputs", model.dtype)[stop - steps : stop, rows].to(device)
    broken = []
    model.eval()
    for index, block in enumerate(model, model.first):
        if block.causal and min(x.shape[:2]) > 1:
            try:
                check_chunk_law(block, x)
            except LawError as error:
                broken.append(f"block {index}: {error}")
        with torch.no_grad():
            x, _ = block(x, block.begin(Rows.of(x.shape[1], steps, device=x.device, dtype=model.dtype)))
    try:
        check_loss(loss, x, targets)
    except LawError as error:
        broken.append(str(error))
    return broken
