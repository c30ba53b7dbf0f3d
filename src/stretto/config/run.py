"""RunConfig: the config of a run, section by section."""

from pathlib import Path as _Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from stretto.base.strict_model import StrictModel
from stretto.config.layout import Layout
from stretto.config.logging import LoggingConfig
from stretto.config.model import ModelConfig
from stretto.config.train import TrainConfig

# TOML has no type for paths, and strict validation would reject a string.
Path = Annotated[_Path, Field(strict=False)]


def _as_text(value: object) -> object:
    return str(value) if isinstance(value, _Path) else value


# A path or a URL; `Path` would change `s3://` to `s3:/`.
Location = Annotated[str, BeforeValidator(_as_text)]


def _split(value: object) -> object:
    """Accept `a,b` from a command line; a file has a list."""
    return tuple(value.split(",")) if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], Field(strict=False), BeforeValidator(_split)]


class DataConfig(StrictModel):
    """The data, and how it is split into windows."""

    train: Location
    """Folder of the training data, made by `stretto prepare`, or the URL of a copy in object storage."""
    valid: Location | None = None
    """Folder or URL of the validation data, with the same vocabulary, labels or channels."""
    feed: Literal["lanes", "batches", "forecast"] | None = None
    """How data becomes rows: `lanes` (streams with carried state), `batches` (sequences of different lengths) or
    `forecast` (sliding windows of series). By default lanes for text, batches for sequences, and for series forecast
    if `context` is set, else lanes."""
    lanes: int = Field(32, ge=1)
    """lanes: number of streams that the data is split into, which are the rows of the global batch."""
    window: int = Field(64, ge=1)
    """lanes: steps of time per optimizer step (the truncated-BPTT length)."""
    budget: int = Field(4096, ge=1)
    """batches, forecast: maximum steps of a global batch, padding included."""
    max_rows: int = Field(65536, ge=1)
    """batches, forecast: maximum rows of a global batch."""
    row_multiple: int = Field(8, ge=1)
    """batches, forecast: batches with more rows than this have a multiple of it, so that replicas get equal shares."""
    context: int | None = Field(None, ge=1)
    """forecast: steps of a series that the network sees before a forecast."""
    stride: int = Field(1, ge=1)
    """forecast: steps between the starts of two windows."""
    every_step: bool = False
    """forecast: train on a forecast at every step of the context, not only the last."""
    horizon: int = Field(1, ge=1)
    """series: steps ahead to forecast."""
    season: int = Field(0, ge=0)
    """series: forecast the difference to the value this many steps before; 0 forecasts the value itself."""
    targets: Names = ()
    """series: the channels to forecast; by default all."""
    masks: bool = False
    """series: add an input for each channel: 1 where its value is present, 0 where it is missing."""
    workers: int = Field(0, ge=0)
    """Worker processes per rank that read ahead; 0 reads in the main process."""
    cache: Path = _Path("~/.cache/stretto")
    """Folder that caches remote data and profiles of models; all ranks of a machine share it."""
    cache_bytes: int = Field(1 << 30, ge=8 << 20)
    """Maximum size of the cached data."""
    retry_seconds: float = Field(300.0, ge=0, allow_inf_nan=False)
    """Seconds for which requests to a remote server are retried."""


class RunSettings(StrictModel):
    """Where and how a run is executed."""

    folder: Path = _Path("runs/default")
    """Folder for config, log, checkpoints and weights; if it holds a run, that run resumes."""
    seed: int = Field(1, ge=0, lt=2**63)
    """Seed of the weights and of all other randomness."""
    device: str = "auto"
    """Device: `auto` (an accelerator if there is one), `cpu`, `cuda`, ..."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16 runs the blocks under autocast; weights, states and losses stay fp32."""
    log_every: int = Field(10, ge=1)
    """Steps between lines of output without a terminal, and between lines of the log that compare ranks. The log has
    a line for every step."""
    eval_every: int | None = Field(None, ge=1)
    """Steps between evaluations; by default there is one, at the end."""
    timeout: float = Field(600.0, gt=0, allow_inf_nan=False)
    """Seconds that a rank waits for another before it reports it as lost."""
    max_restarts: int | None = Field(None, ge=0)
    """How often lost ranks are restarted without a new checkpoint in between. By default 3 if this command starts
    several ranks, and 0 for a single rank."""


class SaveConfig(StrictModel):
    """When and where a run saves checkpoints, and which it keeps."""

    every: int | None = Field(None, ge=1)
    """Steps between checkpoints; by default only `minutes` decides."""
    minutes: float = Field(10.0, ge=0, allow_inf_nan=False)
    """Minutes between checkpoints; with 0 only `every` decides. The last step is always saved."""
    to: Location | None = None
    """Folder or URL for checkpoints; by default `checkpoints` in the run's folder."""
    keep: int = Field(2, ge=1)
    """Number of newest checkpoints to keep."""
    keep_every: int | None = Field(None, ge=1)
    """Also keep the checkpoints of every n-th step."""
    keep_best: bool = False
    """Also keep the checkpoint with the lowest validation loss; then every evaluated step is saved."""


class RunConfig(StrictModel):
    """The config of a run."""

    data: DataConfig
    model: ModelConfig = ModelConfig()
    train: TrainConfig = TrainConfig()
    layout: Layout = Layout()
    run: RunSettings = RunSettings()
    save: SaveConfig = SaveConfig()
    logging: LoggingConfig = LoggingConfig()
