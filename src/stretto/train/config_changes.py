"""Compares a config with the one in a checkpoint, and rejects changes that make the checkpoint unusable."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stretto.base.errors import ConfigError
from stretto.config.run import RunConfig

# If these fields change, saved tensors or positions don't fit, or the targets differ. `_is_incompatible` has some more.
_INCOMPATIBLE_FIELDS = {
    "model": {"cell", "layers", "layers_per_block", "hidden", "embedding", "projection", "locked_dropout", "residual",
              "norm", "bidirectional", "pooling", "tied"},
    "data": {"feed", "lanes", "window", "budget", "max_rows", "row_multiple", "context", "stride", "every_step",
             "horizon", "season", "targets", "known_future", "static", "masks", "scale"},
    "train": {"optimizer", "options"},
    "run": {"seed"},
}  # fmt: skip
# These fields change when a run is moved, so they are not compared.
_LOCATION_FIELDS = {("run", "folder"), ("save", "to")}


@dataclass(frozen=True)
class ConfigChange:
    """A config field whose value differs from the saved one."""

    field: str
    before: object
    now: object
    is_incompatible: bool

    def __str__(self) -> str:
        return f"{self.field} {_text(self.before)} -> {_text(self.now)}"


def find_changes(saved_config: Mapping[str, Any] | None, config: RunConfig) -> list[ConfigChange]:
    """Return the fields of a config that differ from a saved one; an empty list if no config was saved.

    A field that the saved config lacks had its default value. Neither has secrets, which may change.
    """
    changes: list[ConfigChange] = []
    if saved_config is None:
        return changes
    # Data without a train folder or a factory would not be valid.
    defaults = RunConfig.model_validate({"data": {"train": ""}}).model_dump(mode="json")
    for section, values in config.public().items():
        saved = saved_config.get(section, {})
        saved_values = {**defaults[section], **(saved if isinstance(saved, dict) else {})}
        for name, value in values.items():
            saved_value = saved_values.get(name)
            if saved_value != value and (section, name) not in _LOCATION_FIELDS:
                is_incompatible = _is_incompatible(section, name, saved_value, value)
                changes.append(ConfigChange(f"{section}.{name}", saved_value, value, is_incompatible))
    return changes


def _is_incompatible(section: str, name: str, saved_value: object, value: object) -> bool:
    """Return whether a checkpoint can't be used if this field differs from the saved one."""
    match f"{section}.{name}":
        case (
            "model.dropout"
            | "model.weight_dropout"
            | "model.embedding_dropout"
            | "model.activation_penalty"
            | "model.temporal_penalty"
        ):
            # Above 0 they add blocks, which shifts the indices of the blocks after them, or states to a block.
            return not (saved_value and value)
        case "train.groups":
            # Options decide which state the optimizer has; a group's learning rate and weight decay do not.
            groups = [group for side in (saved_value, value) if isinstance(side, list) for group in side]
            return any(isinstance(group, Mapping) and bool(group.get("options")) for group in groups)
        case "train.average":
            return saved_value != "none"  # an average may begin later, but not change
    return name in _INCOMPATIBLE_FIELDS.get(section, ())


def reject_changes(changes: list[ConfigChange], where: str) -> None:
    """Raise if a change makes the checkpoint `where` unusable, or names initial weights that would not be used."""
    for change in changes:
        if change.is_incompatible:
            raise ConfigError(
                f"{change.field}={_text(change.now)}, but {where} was saved with "
                f"{change.field}={_text(change.before)}; set it back, or choose a different run.folder"
            )
        if change.field == "model.weights" and change.now is not None:
            raise ConfigError(
                f"model.weights={change.now} has no effect, as this run resumes from {where}; leave it out, or choose "
                "a different run.folder"
            )


def _text(value: object) -> str:
    return "none" if value is None else str(value)
