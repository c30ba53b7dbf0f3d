"""load_run_model: the model of the run that a command names, with a note on which checkpoint it is from."""

import argparse
import sys
from collections.abc import Sequence

from stretto.base.errors import StrettoError
from stretto.base.run_folder import BEST, split_best
from stretto.checkpoint.best import best_name
from stretto.checkpoint.checkpoint import find_storage, newest_checkpoint
from stretto.checkpoint.lineage import CheckpointName
from stretto.train.trained_model import TrainedModel, load_model


def load_run_model(options: argparse.Namespace, device: str | None, *, is_quiet: bool = False) -> TrainedModel:
    """Load the model of `options.run`; unless `is_quiet`, say which step it is from if the run has a best checkpoint.

    The note goes to stderr, as stdout may be a text that the model generates.
    """
    trained = load_model(options.run, device, trust=options.trust, allowed_locations=options.allowed_locations)
    note = None if is_quiet else describe_checkpoint(options.run, options.allowed_locations)
    if note is not None:
        print(note, file=sys.stderr, flush=True)
    return trained


def describe_checkpoint(location: str, allowed_locations: Sequence[str]) -> str | None:
    """Return which step is used; None if the last is the best, or none is known to be, or for a single checkpoint."""
    run, is_best = split_best(location)
    try:
        # The weights are loaded already: a storage that can't be reached is no reason to fail or to wait.
        storage = find_storage(run, retry_seconds=0, allowed_locations=allowed_locations)
        newest = None if storage is None else newest_checkpoint(storage)
    except (StrettoError, OSError):
        return None
    if newest is None or (best := best_name(newest.scores)) is None:
        return None
    scores, last = newest.scores, CheckpointName.parse(newest.name)
    if is_best:
        return f"using step {best.step} (best: {scores[best]})"
    if last is None or best == last:
        return None
    last_score = f": {scores[last]}" if last in scores else ""
    best_text = f"the best is step {best.step} ({scores[best]}): {run}{BEST}"
    return f"using step {last.step} (last{last_score}); {best_text}"
