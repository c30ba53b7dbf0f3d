"""RunConfig: everything a run is told, section by section."""

from pathlib import Path as _Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from stretto.config.layout import Layout
from stretto.config.model import ModelConfig
from stretto.config.section import Section
from stretto.config.train import TrainConfig

# A file can only write a path as text, which strict types would refuse.
Path = Annotated[_Path, Field(strict=False)]


class DataConfig(Section):
    """Which corpora, and how they are cut."""

    train: Path
    """Folder of the corpus to train on, made by `stretto prepare`."""
    valid: Path | None = None
    """Folder of the held-out corpus, with the same vocabulary."""
    lanes: int = Field(32, ge=1)
    """How many streams the corpus is cut into: the rows of the global batch."""
    window: int = Field(64, ge=1)
    """How many steps of time one optimizer step sees."""


class RunSection(Section):
    """Where a run happens, and what its log says."""

    folder: Path = _Path("runs/default")
    """Folder for config, log and weights; must not hold a run yet."""
    seed: int = Field(1, ge=0, lt=2**63)
    """Seed of the weights and of all randomness."""
    device: str = "auto"
    """Where to compute: `auto` (an accelerator if there is one), `cpu`, `cuda`, ..."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16 runs the blocks under autocast; weights, states and losses stay fp32."""
    log_every: int = Field(10, ge=1)
    """Steps between two lines of progress where there is no terminal; the log file has every step."""
    eval_every: int | None = Field(None, ge=1)
    """Steps between evaluations; only at the end if not given."""


class RunConfig(Section):
    """A run of `stretto train`."""

    data: DataConfig
    model: ModelConfig = ModelConfig()
    train: TrainConfig = TrainConfig()
    layout: Layout = Layout()
    run: RunSection = RunSection()

    @model_validator(mode="after")
    def _check(self) -> Self:
        parts = self.layout.replicas * self.layout.slices
        if parts > self.data.lanes:
            raise ValueError(
                f"layout.replicas={self.layout.replicas} x layout.slices={self.layout.slices} exceeds "
                f"data.lanes={self.data.lanes}; use at most as many as there are lanes"
            )
        return self
