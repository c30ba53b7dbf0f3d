"""Changes: what a config says otherwise than the one a checkpoint was saved under, and what that would mean."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stretto.base.errors import ConfigError
from stretto.config.run import RunConfig

# What gives the saved numbers their meaning. All else is how, where or how fast, or the user's own choice from here on.
_INCOMPATIBLE_FIELDS = {
    "model": {
        "cell",
        "layers",
        "layers_per_block",
        "hidden",
        "embedding",
        "projection",
        "locked_dropout",
        "residual",
        "norm",
    },
    "data": {
        "feed",
        "lanes",
        "window",
        "budget",
        "rows",
        "row_multiple",
        "context",
        "stride",
        "every_step",
        "horizon",
        "season",
        "targets",
        "masks",
    },
    "train": {"optimizer"},
    "run": {"seed"},
}  # fmt: skip
# Where a run is, not what: nobody needs to be told.
_LOCATION_FIELDS = {("run", "folder"), ("save", "to")}


@dataclass(frozen=True)
class ConfigChange:
    """A field that is another now."""

    field: str
    before: object
    now: object
    is_incompatible: bool

    def __str__(self) -> str:
        return f"{self.field} {_text(self.before)} -> {_text(self.now)}"


def find_changes(before: Mapping[str, Any], config: RunConfig) -> list[ConfigChange]:
    """Return the fields that a config has otherwise than a saved one; a field that was not there had its default."""
    found = []
    now = config.model_dump(mode="json")
    defaults = RunConfig.model_validate({"data": {"train": ""}}).model_dump(mode="json")
    for section, values in now.items():
        own = before.get(section, {})
        old = {**defaults[section], **(own if isinstance(own, dict) else {})}
        for name, value in values.items():
            if old.get(name) != value and (section, name) not in _LOCATION_FIELDS:
                # Dropout that is on has blocks of its own, which move the numbers of those after them.
                is_moved = f"{section}.{name}" == "model.dropout" and not (old.get(name) and value)
                is_incompatible = is_moved or name in _INCOMPATIBLE_FIELDS.get(section, ())
                found.append(ConfigChange(f"{section}.{name}", old.get(name), value, is_incompatible))
    return found


def reject_incompatible_changes(changes: list[ConfigChange], where: str) -> None:
    """Refuse changes after which the saved numbers would mean something else."""
    for change in changes:
        if change.is_incompatible:
            raise ConfigError(
                f"{change.field} was {_text(change.before)} when {where} was saved and is {_text(change.now)} now, so "
                "its numbers would mean something else; set it back, or choose another --run.folder"
            )


def reject_initial_weights(changes: list[ConfigChange], where: str) -> None:
    """Refuse weights to begin with where a run goes on: they would not be used."""
    for change in changes:
        if change.field == "model.weights" and change.now is not None:
            raise ConfigError(
                f"model.weights={change.now} is what a run begins with, but this one goes on from {where}; leave it "
                "out, or choose another --run.folder"
            )


def _text(value: object) -> str:
    return "none" if value is None else str(value)
