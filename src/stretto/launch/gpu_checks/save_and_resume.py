"""Saves a checkpoint from one device, reads it back, and compares the resumed training with an uninterrupted one."""

from pathlib import Path

import torch
from torch import Tensor

from stretto.base.tf32 import use_tf32
from stretto.blocks.losses import CrossEntropy
from stretto.checkpoint.manager import CheckpointManager
from stretto.engine.build import make_engine
from stretto.launch.gpu_checks.result import CheckResult
from stretto.launch.gpu_checks.sample import SEED, max_difference, sample_model, sample_trainer
from stretto.mesh.world import World
from stretto.train.trainer import Trainer

_NUM_STEPS, _SAVED_STEP = 6, 3
_TOLERANCE = 1e-4  # a GPU may sum in another order the second time; a CPU must not


@use_tf32(False)
def run(world: World, name: str, folder: Path) -> CheckResult:
    """Train and save, then resume in a new trainer."""
    device, checkpoints = world.device, folder / "checkpoints"
    trainer = _make_trainer(world)
    with CheckpointManager(checkpoints, world) as manager:
        manager.start()
        _advance(trainer, _SAVED_STEP)
        manager.save(trainer.snapshot(), wait=True)
    saved = _copy_tensors(trainer)
    _advance(trainer, _NUM_STEPS)

    resumed = _make_trainer(world)
    with CheckpointManager(checkpoints, world) as manager:
        checkpoint = manager.start()
        if checkpoint is None:
            return CheckResult("failed", f"no checkpoint was found after saving one from {device}")
        resumed.restore(checkpoint)
    restored = _copy_tensors(resumed)
    changed = [key for key, tensor in saved.items() if not torch.equal(tensor, restored[key])]
    _advance(resumed, _NUM_STEPS)
    difference = max_difference(_copy_tensors(resumed), _copy_tensors(trainer))
    tolerance = 0.0 if device.type == "cpu" else _TOLERANCE
    figures = {"device": str(device), "resume_difference": difference, "tolerance": tolerance, "changed": changed}
    bits = "the same bits" if difference == 0 else f"values within {difference:.1e}"
    figure = f"{device}, {bits} after resuming"
    if changed:
        message = f"a checkpoint saved from {device} reads back with other values for {', '.join(changed[:3])}"
        return CheckResult("failed", message, figure, figures)
    if not difference <= tolerance:
        message = f"resumed training on {device} differs by {difference:.1e} (tolerance {tolerance:.0e})"
        return CheckResult("failed", message, figure, figures)
    message = f"saved from {device}, read back with the same bits; resumed training has {bits}"
    return CheckResult("passed", message, figure, figures)


def _make_trainer(world: World) -> Trainer:
    return sample_trainer(make_engine(sample_model(), CrossEntropy(), world=world, seed=SEED), _NUM_STEPS, "adamw")


def _advance(trainer: Trainer, step: int) -> None:
    while trainer.step < step:
        trainer.advance()


def _copy_tensors(trainer: Trainer) -> dict[str, Tensor]:
    """Return copies of the weights and of the lanes' state, on the CPU."""
    tensors = trainer.engine.stack.state_dict()
    tensors |= {f"state {index}": tensor for index, tensor in enumerate(trainer.state or ())}
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
