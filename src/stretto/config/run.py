"""RunConfig: everything a run is told, section by section."""

from pathlib import Path as _Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from stretto.base.strict_model import StrictModel
from stretto.config.layout import Layout
from stretto.config.model import ModelConfig
from stretto.config.train import TrainConfig
from stretto.config.watch import WatchConfig

# A file can only write a path as text, which strict types would refuse.
Path = Annotated[_Path, Field(strict=False)]


def _as_text(value: object) -> object:
    return str(value) if isinstance(value, _Path) else value


# A path or a URL, which a path would spoil.
Location = Annotated[str, BeforeValidator(_as_text)]


def _split(value: object) -> object:
    """A command line gives names with commas between them, a file gives a list."""
    return tuple(value.split(",")) if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], Field(strict=False), BeforeValidator(_split)]


class DataConfig(StrictModel):
    """Which data, and how it is cut into windows."""

    train: Location
    """Folder of the data to train on, made by `stretto prepare`, or the URL of a copy in object storage."""
    valid: Location | None = None
    """Folder or URL of held-out data, with the same vocabulary, labels or channels."""
    feed: Literal["lanes", "batches", "forecast"] | None = None
    """How: streams whose state is carried, rows of unequal length, or stretches of series; if not given, lanes for
    text, batches for sequences, and for series a forecast if `context` is set, else lanes."""
    lanes: int = Field(32, ge=1)
    """lanes: how many streams the data is cut into, the rows of the global batch."""
    window: int = Field(64, ge=1)
    """lanes: how many steps of time one optimizer step sees."""
    budget: int = Field(4096, ge=1)
    """batches, forecast: steps of a global batch, its rows padded to its longest."""
    rows: int = Field(65536, ge=1)
    """batches, forecast: rows of a global batch, at most."""
    row_multiple: int = Field(8, ge=1)
    """batches, forecast: larger batches have a multiple of so many rows, so that replicas get as many each."""
    context: int | None = Field(None, ge=1)
    """forecast: steps of a series that a forecast may look at."""
    stride: int = Field(1, ge=1)
    """forecast: steps between the starts of two stretches."""
    every_step: bool = False
    """forecast: ask at every step of the context in training, not only at its last."""
    horizon: int = Field(1, ge=1)
    """series: how many steps ahead are asked for."""
    season: int = Field(0, ge=0)
    """series: ask for the difference to the value so many steps before; 0 asks for the value."""
    targets: Names = ()
    """series: the channels that are asked for; all of them if none are named."""
    masks: bool = False
    """series: give the network one more input for each channel, which says whether its value is there."""
    workers: int = Field(0, ge=0)
    """Processes that read ahead on each rank; 0 reads when a window is needed."""
    cache: Path = _Path("~/.cache/stretto")
    """Folder that keeps pages of remote data, and profiles of models; all ranks of a machine share it."""
    cache_bytes: int = Field(1 << 30, ge=8 << 20)
    """How much of remote data that folder keeps at most."""
    retry_seconds: float = Field(300.0, ge=0, allow_inf_nan=False)
    """Seconds for which a remote server may be away before the run gives up."""


class RunSettings(StrictModel):
    """Where a run happens, and what its log says."""

    folder: Path = _Path("runs/default")
    """Folder for config, log, checkpoints and weights; a run that is in it already goes on."""
    seed: int = Field(1, ge=0, lt=2**63)
    """Seed of the weights and of all randomness."""
    device: str = "auto"
    """Where to compute: `auto` (an accelerator if there is one), `cpu`, `cuda`, ..."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16 runs the blocks under autocast; weights, states and losses stay fp32."""
    log_every: int = Field(10, ge=1)
    """Steps between two lines of progress where there is no terminal, and between two lines of the log that compare
    ranks; of steps, the log has every one."""
    eval_every: int | None = Field(None, ge=1)
    """Steps between evaluations; only at the end if not given."""
    timeout: float = Field(600.0, gt=0, allow_inf_nan=False)
    """Seconds for which a rank waits for another before it gives it up."""
    restarts: int | None = Field(None, ge=0)
    """How often ranks that were lost are started again without a step saved in between; 3 if not given and several
    ranks are started here, while one rank alone is watched only if this is given."""


class SaveConfig(StrictModel):
    """When a run saves a checkpoint, where, and which are kept."""

    every: int | None = Field(None, ge=1)
    """Steps between checkpoints; if not given, only `minutes` decides."""
    minutes: float = Field(10.0, ge=0, allow_inf_nan=False)
    """Minutes between checkpoints; 0 leaves it to `every`. One is always saved at the end."""
    to: Location | None = None
    """Folder or URL for checkpoints; `checkpoints` in the run's folder if not given."""
    keep: int = Field(2, ge=1)
    """How many of the last checkpoints are kept."""
    keep_every: int | None = Field(None, ge=1)
    """Checkpoints of every so many steps are kept too."""
    keep_best: bool = False
    """Keep the one with the least held-out loss too; each evaluation then saves one."""


class RunConfig(StrictModel):
    """A run of `stretto train`."""

    data: DataConfig
    model: ModelConfig = ModelConfig()
    train: TrainConfig = TrainConfig()
    layout: Layout = Layout()
    run: RunSettings = RunSettings()
    save: SaveConfig = SaveConfig()
    watch: WatchConfig = WatchConfig()
