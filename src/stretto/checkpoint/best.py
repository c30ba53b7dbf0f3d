"""The best checkpoint of a run: the one with the best validation loss or metric. `RUN@best` names it."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict

from stretto.base.checksummed_json import dump_with_checksum, load_with_checksum
from stretto.base.errors import StrettoError
from stretto.base.score import Score
from stretto.checkpoint.lineage import CheckpointName
from stretto.checkpoint.storage import Storage

EVALUATION = "evaluation.json"  # a file of a checkpoint, with its score


def best_name(scores: Mapping[CheckpointName, Score]) -> CheckpointName | None:
    """Return the checkpoint with the best score, the first one if several have it; None if there are no scores.

    Only scores of one kind can be compared: those of the newest checkpoint's kind count.
    """
    if not scores:
        return None
    newest = scores[max(scores)]
    names = [name for name, score in scores.items() if (score.name, score.mode) == (newest.name, newest.mode)]
    return min(names, key=lambda name: (scores[name].badness, name))


def read_scores(storage: Storage, names: Iterable[CheckpointName]) -> dict[CheckpointName, Score]:
    """Return the scores of those checkpoints that have one in an intact file."""
    scores: dict[CheckpointName, Score] = {}
    for name in names:
        with suppress(OSError, ValueError, KeyError, TypeError, StrettoError):
            tree = load_with_checksum(storage.read(f"{name}/{EVALUATION}"))
            score = Score(float(tree["value"]), str(tree["name"]), "max" if tree["mode"] == "max" else "min")
            if score.is_finite:
                scores[name] = score
    return scores


def write_score(storage: Storage, name: CheckpointName, score: Score) -> None:
    """Write the score of a checkpoint into its folder."""
    storage.create(f"{name}/{EVALUATION}", dump_with_checksum(asdict(score)))
