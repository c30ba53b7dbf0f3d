"""Layout: how a step is cut; never what it computes."""

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from stretto.base.strict_model import StrictModel


def _split(value: object) -> object:
    """A command line gives numbers with commas between them, a file gives a list."""
    if not isinstance(value, str):
        return value
    parts = [part for part in value.split(",") if part]
    if not all(part.strip().isdecimal() for part in parts):
        raise ValueError(f"{value!r} is not a list of numbers; write it like 5,1")
    return tuple(map(int, parts))


Counts = Annotated[tuple[int, ...], Field(strict=False), BeforeValidator(_split)]


class Layout(StrictModel):
    """How a step is cut over ranks, rows and time; never what it computes."""

    replicas: int = Field(1, ge=1)
    """Whole copies of the model, each with a share of the rows."""
    stages: int = Field(1, ge=1)
    """Ranks that one copy is spread over, each with a run of blocks."""
    micro_batches: int = Field(1, ge=1)
    """Parts of a replica's rows, whose gradients are added up."""
    chunks: int = Field(1, ge=1)
    """Parts of a window's time; while a stage works on one, the stage before it works on the next."""
    recompute: bool = False
    """Run a chunk's forward again in its backward rather than keep its activations: less memory, more time."""

    blocks: Counts = ()
    """How many blocks each stage holds, in order; balanced by what they seem to cost if not given."""
    adjacent: Literal["stages", "replicas"] = "stages"
    """What lies on neighbouring ranks, and so on one machine: the stages of a replica, or a stage of all replicas."""
    auto: bool = False
    """Measure, and take the layout that is predicted to be fastest; written `layout = "auto"` too."""
    elastic: bool = False
    """Fit replicas and stages to the ranks there are, rather than refuse a number that isn't replicas x stages."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = self.model_fields_set - {"auto", "elastic"}
        if self.auto and any(getattr(self, name) != type(self).model_fields[name].default for name in given):
            raise ValueError(f"auto chooses {', '.join(sorted(given))} itself; leave them out, or set auto to false")
        if self.blocks and (len(self.blocks) != self.stages or min(self.blocks) < 1):
            raise ValueError(
                f"blocks={list(self.blocks)} must say for each of stages={self.stages} how many blocks it holds, "
                "1 at least"
            )
        return self

    @property
    def num_ranks(self) -> int:
        """How many ranks it needs: replicas x stages."""
        return self.replicas * self.stages

    @property
    def num_global_micro_batches(self) -> int:
        """How many parts the rows of a global batch are cut into."""
        return self.replicas * self.micro_batches

    def __str__(self) -> str:
        text = f"{self.replicas} x {self.stages} x {self.micro_batches} x {self.chunks}"
        return f"{text} (replicas x stages x micro-batches x chunks){', recompute' if self.recompute else ''}"
