"""Layout: how a step is split over ranks, rows and time."""

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from stretto.base.strict_model import StrictModel


def _split(value: object) -> object:
    """Accept `5,1` from a command line; a file has a list."""
    if not isinstance(value, str):
        return value
    parts = [part for part in value.split(",") if part]
    if not all(part.strip().isdecimal() for part in parts):
        raise ValueError(f"{value!r} is not a list of numbers; write it as in 5,1")
    return tuple(map(int, parts))


Counts = Annotated[tuple[int, ...], Field(strict=False), BeforeValidator(_split)]


class Layout(StrictModel):
    """How a step is split over ranks, rows and time. It never changes what the step computes."""

    replicas: int = Field(1, ge=1)
    """Copies of the model, each with a share of the rows: data parallelism."""
    stages: int = Field(1, ge=1)
    """Ranks per copy of the model, each with some consecutive blocks: pipeline parallelism."""
    micro_batches: int = Field(1, ge=1)
    """Parts of a replica's rows, whose gradients are accumulated."""
    chunks: int = Field(1, ge=1)
    """Parts of a window in time; while a stage works on one, the stage before works on the next."""
    recompute: bool = False
    """Recompute the activations of a chunk in its backward (activation checkpointing): less memory, more time."""

    blocks: Counts = ()
    """Number of blocks of each stage, in order; by default they are balanced by their estimated cost."""
    adjacent: Literal["stages", "replicas"] = "stages"
    """What is placed on adjacent ranks, and so on one machine: the stages of a replica, or the replicas of a stage."""
    auto: bool = False
    """Measure the model, and use the layout that is predicted to be fastest; `layout = "auto"` is the same."""
    elastic: bool = False
    """Fit replicas and stages to the number of ranks, if it isn't replicas x stages."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = self.model_fields_set - {"auto", "elastic"}
        if self.auto and any(getattr(self, name) != type(self).model_fields[name].default for name in given):
            raise ValueError(f"auto chooses {', '.join(sorted(given))} itself; leave them out, or set auto to false")
        if self.blocks and (len(self.blocks) != self.stages or min(self.blocks) < 1):
            raise ValueError(
                f"blocks={list(self.blocks)} must have one number, 1 or more, for each of stages={self.stages}"
            )
        return self

    @property
    def num_ranks(self) -> int:
        """The number of ranks: replicas x stages."""
        return self.replicas * self.stages

    @property
    def num_global_micro_batches(self) -> int:
        """The number of micro-batches of a global batch."""
        return self.replicas * self.micro_batches

    def __str__(self) -> str:
        text = f"{self.replicas} x {self.stages} x {self.micro_batches} x {self.chunks}"
        return f"{text} (replicas x stages x micro-batches x chunks){', recompute' if self.recompute else ''}"
