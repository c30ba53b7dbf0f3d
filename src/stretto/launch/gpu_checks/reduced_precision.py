"""Trains in bf16 or fp16, and compares the loss with that in fp32."""

import math
from pathlib import Path

import torch

from stretto.base.tf32 import use_tf32
from stretto.blocks.losses import CrossEntropy
from stretto.engine.build import make_engine
from stretto.engine.precision import Precision
from stretto.launch.gpu_checks.result import CheckResult
from stretto.launch.gpu_checks.sample import SEED, sample_model, sample_trainer
from stretto.mesh.world import World

_NUM_STEPS = 10
# bf16 has 8 significant bits and fp16 has 11; allow 8 times the rounding error.
_TOLERANCES: dict[Precision, float] = {"bf16": 8 * 2**-8, "fp16": 8 * 2**-11}


@use_tf32(False)
def run(world: World, name: str, folder: Path) -> CheckResult:
    """Compare the losses of the last step."""
    precision: Precision = "bf16" if name == "bf16" else "fp16"
    if (
        precision == "bf16"
        and world.device.type == "cuda"
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        return CheckResult("skipped", "this GPU has no bf16")
    expected = _train(world, "fp32")
    try:
        losses = _train(world, precision)
    except RuntimeError as error:
        if world.device.type == "cpu" and "not implemented" in str(error):
            return CheckResult("skipped", f"torch has no LSTM in {precision} on this CPU")
        raise
    tolerance = _TOLERANCES[precision]
    difference = abs(losses[-1] - expected[-1]) / expected[-1]
    figures = {f"{precision}_losses": losses, "fp32_losses": expected, "difference": difference, "tolerance": tolerance}
    figure = f"loss {losses[-1]:.4f}, fp32 {expected[-1]:.4f}"
    after = f"after {_NUM_STEPS} steps on {world.device} the loss is {losses[-1]:.4f} in {precision}"
    comparison = (
        f"{expected[-1]:.4f} in fp32: a difference of {100 * difference:.2g}% (tolerance {100 * tolerance:.2g}%)"
    )
    if not (math.isfinite(difference) and difference <= tolerance):
        return CheckResult("failed", f"{after}, but {comparison}", figure, figures)
    return CheckResult("passed", f"{after} and {comparison}", figure, figures)


def _train(world: World, precision: Precision) -> list[float]:
    engine = make_engine(sample_model(), CrossEntropy(), world=world, seed=SEED, precision=precision)
    return [report.loss for report in sample_trainer(engine, _NUM_STEPS, "adamw")]
