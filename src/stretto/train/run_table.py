"""run_table: a run at a glance, for notebooks: its state, its last losses and its best checkpoint."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stretto.base.errors import StrettoError
from stretto.base.html_table import html_table
from stretto.base.log_segments import list_segments, segment_lines
from stretto.base.run_folder import BEST, RunFolder
from stretto.checkpoint.checkpoint import find_checkpoint
from stretto.config.layout import Layout
from stretto.train.trainer import Trainer


def run_table(folder: RunFolder, layout: Layout, trainer: Trainer, checkpoints: str) -> str:
    """Return an HTML table; losses are from the run's log, and `checkpoints` is the location of its checkpoints."""
    steps, evaluations = _read_losses(folder.log)
    rows = [("run", str(folder)), ("layout", str(layout)), ("state", _state(trainer))]
    for name, losses in (("training loss", steps), ("validation loss", evaluations)):
        if losses:
            step = max(losses)
            rows.append((name, f"{_text(losses[step])} after step {step}"))
    best_step = _find_best(checkpoints)
    if best_step is not None:
        rows.append(("best checkpoint", f"step {best_step}, validation loss {_text(evaluations.get(best_step))}"))
    return html_table(("", ""), rows)


def _state(trainer: Trainer) -> str:
    if trainer.has_stopped_early:
        return f"stopped early after step {trainer.step}"
    if trainer.is_done:
        return f"finished after step {trainer.step}"
    if not trainer.step:
        return "not started"
    return f"after step {trainer.step}, {trainer.progress:.0%} done"


def _text(loss: float | None) -> str:
    return "unknown" if loss is None else f"{loss:.4f}"  # null in the log: not finite


def _read_losses(log: Path) -> tuple[dict[int, float | None], dict[int, float | None]]:
    """Return the last training loss and all validation losses in a log, by step."""
    steps: dict[int, float | None] = {}
    evaluations: dict[int, float | None] = {}
    for line in _parsed_lines(log):
        if line.get("kind") == "step":
            steps = {line["step"]: line["loss"]}
        elif line.get("kind") == "evaluation":
            evaluations[line["step"]] = line["loss"]
    return steps, evaluations


def _parsed_lines(log: Path) -> Iterator[dict[str, Any]]:
    for line in filter(None, segment_lines(list_segments(log))):
        try:
            yield json.loads(line)
        except ValueError:
            continue  # incomplete: the run is writing it, or was killed while it did


def _find_best(checkpoints: str) -> int | None:
    """Return the step of the best checkpoint; None if the run keeps none, or has none yet."""
    try:
        return find_checkpoint(checkpoints + BEST).manifest.training_state.step
    except StrettoError:
        return None
