"""The names of built-in metrics, and of the other scores of an evaluation."""

from stretto.base.score import ScoreMode

EVALUATION_FIELDS = ("kind", "step", "loss", "num_targets")  # of an evaluation's log line that are not metrics
PER_CLASS = "per_class"  # a table, and not a number
CLASS_METRICS = ("accuracy", "f1", PER_CLASS)
SYMBOL_METRICS = ("error_rate", "word_error_rate", "character_error_rate")  # of a sequence of symbols per row
ENTITY_F1 = "entity_f1"  # of a tag per time step
ROW_METRICS = (*SYMBOL_METRICS, ENTITY_F1)  # compare whole rows
BUILT_IN_METRICS = (*CLASS_METRICS, "mae", *ROW_METRICS)

SCORE_MODES: dict[str, ScoreMode] = {
    "loss": "min",
    "perplexity": "min",
    "bits_per_byte": "min",
    "accuracy": "max",
    "f1": "max",
    "mae": "min",
    "error_rate": "min",
    "word_error_rate": "min",
    "character_error_rate": "min",
    ENTITY_F1: "max",
}
"""Whether a lower or a higher value is better, for each score with a name of stretto's."""
EVERY_EVALUATION = ("loss", "perplexity", "bits_per_byte", "accuracy")  # has these, if the data and the loss allow it
