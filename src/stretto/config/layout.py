"""Layout: how a step is cut; never what it computes."""

from pydantic import Field

from stretto.config.section import Section


class Layout(Section):
    """How a step is cut over ranks, rows and time; never what it computes."""

    replicas: int = Field(1, ge=1)
    """Whole copies of the model, each with a share of the rows."""
    stages: int = Field(1, ge=1)
    """Ranks that one copy is spread over, each with a run of blocks."""
    slices: int = Field(1, ge=1)
    """Parts of a replica's rows, whose gradients are added up."""
    chunks: int = Field(1, ge=1)
    """Parts of a window's time; while a stage works on one, the stage before it works on the next."""
    recompute: bool = False
    """Run a chunk's forward again in its backward rather than keep its activations: less memory, more time."""

    elastic: bool = False
    """Fit replicas and stages to the ranks there are, rather than refuse a number that isn't replicas x stages."""

    @property
    def num_ranks(self) -> int:
        return self.replicas * self.stages

    @property
    def num_parts(self) -> int:
        """How many parts the rows of a global batch are cut into."""
        return self.replicas * self.slices

    def __str__(self) -> str:
        text = f"{self.replicas} x {self.stages} x {self.slices} x {self.chunks}"
        return f"{text} (replicas x stages x slices x chunks){', recompute' if self.recompute else ''}"
