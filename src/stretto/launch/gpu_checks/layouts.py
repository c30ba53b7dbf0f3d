"""Trains a few steps in a layout, plain and recorded, and compares them with the same steps on one device."""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from stretto.base.tf32 import use_tf32
from stretto.blocks.initialize import initialize
from stretto.blocks.losses import CrossEntropy
from stretto.blocks.stack import Stack
from stretto.config.layout import Layout
from stretto.engine.build import make_engine, stage_parts
from stretto.engine.gather import gather_model_tensors
from stretto.engine.local import LocalEngine
from stretto.launch.gpu_checks.result import CheckResult
from stretto.launch.gpu_checks.sample import SEED, max_difference, sample_model, sample_trainer
from stretto.mesh.world import World

LAYOUTS = {
    "two replicas": Layout(replicas=2),
    "two stages": Layout(stages=2, micro_batches=2),
    "two stages, chunks": Layout(stages=2, chunks=4),
    "hybrid 2 x 2": Layout(replicas=2, stages=2, chunks=4),
}
TOLERANCE = 1e-4
"""A layout sums in another order; fp32 has 24 significant bits, and steps add to the differences."""
_NUM_STEPS = 3


@dataclass(frozen=True)
class _Training:
    """The losses of all steps, the gradients of the last, and the weights after it."""

    losses: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]

    def differences(self, expected: "_Training") -> dict[str, float]:
        return {
            "loss": max(abs(a - b) / abs(b) for a, b in zip(self.losses, expected.losses, strict=True)),
            "gradients": max_difference(self.gradients, expected.gradients),
            "weights": max_difference(self.weights, expected.weights),
        }


@use_tf32(False)
def run(world: World, name: str, folder: Path) -> CheckResult | None:
    """Compare on rank 0; the other ranks return None."""
    layout = LAYOUTS[name]
    plain, _ = _train(world, layout, is_recorded=False)
    recorded, num_actions = _train(world, layout, is_recorded=True)
    if not world.is_rank_zero:
        return None
    expected = _train_on_one_device(world)
    by_step = {"plain": plain.differences(expected), "recorded": recorded.differences(expected)}
    figures = {"differences": by_step, "tolerance": TOLERANCE, "recorded_actions": num_actions, "losses": plain.losses}
    worst, step, quantity = max(
        (value, step, quantity) for step, values in by_step.items() for quantity, value in values.items()
    )
    figure = f"difference {worst:.1e} (limit {TOLERANCE:.0e})"
    if not worst <= TOLERANCE:
        message = (
            f"the {step} steps differ from those on one device by {worst:.1e} in {quantity} (tolerance {TOLERANCE:.0e})"
        )
        return CheckResult("failed", message, figure, figures)
    if not num_actions:
        return CheckResult(
            "failed", "the recorded step has recorded no actions, or some that end before they start", figure
        )
    message = f"{_NUM_STEPS} plain and {_NUM_STEPS} recorded steps equal those on one device within {TOLERANCE:.0e}"
    return CheckResult("passed", message, figure, figures)


def _train(world: World, layout: Layout, *, is_recorded: bool) -> tuple[_Training, int]:
    """Return the result of training in a layout, and how many actions this rank recorded in the last step."""
    model = sample_model()
    engine = make_engine(model, CrossEntropy(), layout, world, seed=SEED)
    trainer = sample_trainer(engine, _NUM_STEPS)
    trainer.is_recording = is_recorded
    losses = [report.loss for report in trainer]
    parts = stage_parts(model, layout)
    training = _Training(
        losses,
        gather_model_tensors(model, parts, _gradients(engine.stack), engine.mesh),
        gather_model_tensors(model, parts, engine.stack.state_dict(), engine.mesh),
    )
    actions = [event for event in trainer.recorded_events if event.action is not None]
    return training, len(actions) if all(event.start <= event.stop for event in actions) else 0


def _train_on_one_device(world: World) -> _Training:
    engine = LocalEngine(initialize(sample_model(), SEED, world.device), CrossEntropy())
    losses = [report.loss for report in sample_trainer(engine, _NUM_STEPS)]
    return _Training(losses, _gradients(engine.stack), engine.stack.state_dict())


def _gradients(stack: Stack) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in stack.named_parameters() if parameter.grad is not None}
