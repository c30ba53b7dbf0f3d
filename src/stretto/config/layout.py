"""Layout: how a training step is split over ranks, rows and time."""

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from stretto.base.html_table import html_table
from stretto.base.strict_model import StrictModel


def _parse_counts(value: object) -> object:
    """Convert the text `5,1` of a command-line option to a tuple; return anything else, such as a list, unchanged."""
    if not isinstance(value, str):
        return value
    parts = [part for part in value.split(",") if part]
    if not all(part.strip().isdecimal() for part in parts):
        raise ValueError(f"{value!r} is not a list of integers; separate them with commas, as in 5,1")
    return tuple(map(int, parts))


Counts = Annotated[tuple[int, ...], Field(strict=False), BeforeValidator(_parse_counts)]


class Layout(StrictModel):
    """How a training step is split over ranks, rows and time. The split never changes what the step computes."""

    replicas: int = Field(1, ge=1)
    """Copies of the model, each trained on its share of the rows: data parallelism."""
    stages: int = Field(1, ge=1)
    """Ranks per replica, each with some consecutive blocks of the model: pipeline parallelism."""
    micro_batches: int = Field(1, ge=1)
    """Parts that a replica's rows are split into; their gradients are accumulated."""
    chunks: int = Field(1, ge=1)
    """Parts that a window is split into in time; while a stage computes one, the stage before it computes the next."""
    spans: int = Field(1, ge=1)
    """Ranks per replica, each with all blocks and a part of the window's time; for bidirectional or affine blocks."""
    recompute: bool = False
    """Recompute a chunk's activations in its backward (activation checkpointing): less memory, more time."""
    vocab_parallel: bool = False
    """Split the table of the output layer over the stages: each computes its part of the logits of every chunk."""

    interleave: int = Field(1, ge=1)
    """Runs of blocks per stage (virtual stages): chunks pass the stages this many times, so that stages wait less."""
    blocks: Counts = ()
    """Number of blocks in each stage (with `interleave`, in each run), in order; by default, costs are balanced."""
    adjacent: Literal["stages", "replicas"] = "stages"
    """What is placed on adjacent ranks, usually on one node: the stages of a replica, or the replicas of a stage."""
    auto: bool = False
    """Profile the model, try the best layouts and use the fastest; short form: `layout = "auto"`."""
    elastic: bool = False
    """Change replicas and stages (or spans) to fit the number of ranks, if that is not what the layout needs."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        given_fields = self.model_dump(exclude_defaults=True, exclude={"auto", "elastic"})
        if self.auto and given_fields:
            raise ValueError(f"auto can't be combined with {', '.join(given_fields)}; leave out one or the other")
        if self.blocks and (len(self.blocks) != self.num_runs or min(self.blocks) < 1):
            runs = f"run (stages={self.stages} x interleave={self.interleave})"
            unit = runs if self.num_runs > self.stages else f"stage (stages={self.stages})"
            raise ValueError(f"blocks={list(self.blocks)} must have one number >= 1 per {unit}")
        if self.interleave > 1 and self.vocab_parallel:
            raise ValueError(
                f"interleave={self.interleave} can't be combined with vocab_parallel; leave out one of them"
            )
        if self.spans > 1 and self.vocab_parallel:
            raise ValueError(
                f"spans={self.spans} can't be combined with vocab_parallel=true, which splits the output layer over "
                "stages; leave out one of them"
            )
        for name in ("stages", "chunks", "interleave"):
            if self.spans > 1 and getattr(self, name) > 1:
                raise ValueError(
                    f"spans={self.spans} can't be combined with {name}={getattr(self, name)}: a span has all blocks "
                    "and one part of the time; leave out one or the other"
                )
        return self

    @property
    def splits_vocab(self) -> bool:
        """Whether the table of the output layer is split over several stages."""
        return self.vocab_parallel and self.stages > 1

    @property
    def num_runs(self) -> int:
        """The number of runs of blocks in a replica: stages x interleave; one stage has one run."""
        return self.stages * self.interleave if self.stages > 1 else 1

    @property
    def is_interleaved(self) -> bool:
        """Whether stages hold several runs of blocks each."""
        return self.num_runs > self.stages

    @property
    def num_ranks(self) -> int:
        """The number of ranks: replicas x stages, or replicas x spans."""
        return self.replicas * self.stages * self.spans

    @property
    def num_global_micro_batches(self) -> int:
        """The number of micro-batches in a global batch: replicas x micro_batches."""
        return self.replicas * self.micro_batches

    def effective(self, *, is_causal: bool = True) -> "Layout":
        """Return the layout without what has no effect in it, so that layouts in which a model runs alike are equal.

        If the model looks ahead in time, one stage computes whole windows, and so do all stages that share a head: no
        other stage could work on chunks meanwhile.
        """
        one_chunk = not is_causal and (self.stages == 1 or self.splits_vocab)
        has_neighbors = self.replicas > 1 and self.stages * self.spans > 1
        return self.model_copy(
            update={
                "chunks": 1 if one_chunk else self.chunks,
                "interleave": self.interleave if self.stages > 1 else 1,
                "vocab_parallel": self.splits_vocab,
                "adjacent": self.adjacent if has_neighbors else "stages",
                "elastic": False,
            }
        )

    @property
    def name(self) -> str:
        """The layout in short, without counts of 1 and without `blocks`: `2 stages x 8 chunks, interleave 2`."""
        counts = {
            "replicas": self.replicas,
            "stages": self.stages,
            "spans": self.spans,
            "micro-batches": self.micro_batches,
            "chunks": self.chunks,
        }
        notes = {
            f"interleave {self.interleave}": self.is_interleaved,
            "adjacent replicas": self.adjacent == "replicas",
            "recompute": self.recompute,
            "vocab_parallel": self.splits_vocab,
        }
        sizes = ["one device"] if self.num_ranks == 1 else []
        sizes += [f"{count} {part}" for part, count in counts.items() if count > 1]
        return ", ".join([" x ".join(sizes), *(note for note, applies in notes.items() if applies)])

    def _repr_html_(self) -> str:
        """Return a table for notebooks: all sizes, and the other fields that are set."""
        sizes = ("replicas", "stages", "micro_batches", "chunks")
        others = self.model_dump(exclude_defaults=True, exclude={*sizes})
        fields = {name: getattr(self, name) for name in sizes} | others
        return html_table(list(fields), [list(fields.values())])

    def __str__(self) -> str:
        blocks = f", blocks {','.join(map(str, self.blocks))}" if len(self.blocks) > 1 else ""
        return f"{self.name}{blocks}"
