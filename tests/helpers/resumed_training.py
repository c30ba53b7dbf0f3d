"""resume_and_train: trains up to a step from the newest checkpoint in a folder, if there is one."""

from pathlib import Path

from stretto import CheckpointManager, Trainer, World


def resume_and_train(trainer: Trainer, folder: Path, world: World, stop: int) -> list[float]:
    """Resume from the checkpoints in a folder, train up to a step, and save there; return the losses."""
    with CheckpointManager(folder, world) as checkpoints:
        saved = checkpoints.start()
        if saved is not None:
            trainer.restore(saved)
        losses = [trainer.advance().loss for _ in range(trainer.step, stop)]
        checkpoints.save(trainer.snapshot(), wait=True)
    return losses
