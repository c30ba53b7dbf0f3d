"""RunConfig, the config of a run, and its sections [data], [run] and [save]."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from stretto.base.metric_names import BUILT_IN_METRICS, EVERY_EVALUATION, PER_CLASS
from stretto.base.redact import redact
from stretto.base.strict_model import StrictModel, suggest_name
from stretto.config.layout import Layout
from stretto.config.logging import LoggingConfig
from stretto.config.model import ModelConfig
from stretto.config.sentinel import SentinelConfig
from stretto.config.train import TrainConfig

# TOML has no type for paths, and strict validation would reject a string.
Folder = Annotated[Path, Field(strict=False)]
# A path or a URL; `Path` would change `s3://` to `s3:/`.
Location = Annotated[str, BeforeValidator(lambda value: str(value) if isinstance(value, Path) else value)]
# A list, or the text `a,b` of a command-line option; an empty text is an empty list.
_SPLIT_TEXT = BeforeValidator(
    lambda value: tuple(value.split(",") if value else ()) if isinstance(value, str) else value
)
Names = Annotated[tuple[str, ...], Field(strict=False), _SPLIT_TEXT]
OptionalNames = Annotated[tuple[str, ...] | None, Field(strict=False), _SPLIT_TEXT]

GRACE_SECONDS = 60
"""The default of `run.grace_seconds`."""


class DataConfig(StrictModel):
    """The data, and how it is split into windows. A prefix such as `lanes:` says which feeds or data a field is for."""

    train: Location | None = None
    """Folder of the training data, made by `stretto prepare`, or the URL of a copy in object storage."""
    valid: Location | None = None
    """Folder or URL of the validation data, with the same vocabulary, labels or channels."""
    factory: str | None = None
    """Instead of `train` and `valid`: your own data, as `file.py:function` or `package.module:function`. The function
    is called without arguments, on every rank, and returns rows for batches, as `stretto.data.from_arrays` does, or
    windows, such as `Batches`; or a pair of them, for training and validation. Rows become batches with `budget`,
    `max_rows`, `row_multiple` and `run.seed`; windows have their own sizes and seed."""
    feed: Literal["lanes", "batches", "forecast"] | None = None
    """How data becomes rows: `lanes` (streams with carried state; also to forecast series), `batches` (sequences of
    different lengths) or `forecast` (sliding windows of series, without carried state). By default: lanes for a corpus;
    for channels without targets, forecast if `context` is set, else lanes; batches for other sequences."""
    lanes: int = Field(32, ge=1)
    """lanes: number of parallel streams that the data is split into; each is a row of the global batch."""
    window: int = Field(64, ge=1)
    """lanes: time steps per optimizer step (the truncated-BPTT length)."""
    budget: int = Field(4096, ge=1)
    """batches, forecast: maximum time steps of all rows of a global batch together, padding included."""
    max_rows: int | None = Field(None, ge=1)
    """batches, forecast: maximum rows of a global batch. By default only `budget` limits them."""
    row_multiple: int = Field(8, ge=1)
    """batches, forecast: the rows of a global batch, if more, are rounded down to a multiple of this, so that replicas
    get equal shares; not those of a pool's last batch."""
    context: int | None = Field(None, ge=1)
    """forecast: time steps of a series that the network sees before it makes a forecast. batches, if each time step
    has its own target: maximum time steps of a row; longer sequences are cut into several rows."""
    stride: int = Field(1, ge=1)
    """forecast: time steps between the starts of consecutive windows."""
    every_step: bool = False
    """forecast: train on a forecast at every time step of the context, not only at the last."""
    horizon: int = Field(1, ge=1)
    """channels without targets: number of time steps to forecast."""
    season: int = Field(0, ge=0)
    """channels without targets: forecast the change from the value this many time steps before (0: the value)."""
    targets: Names = ()
    """channels without targets: the channels to forecast; by default all except `known_future` and `static`."""
    known_future: OptionalNames = None
    """channels without targets: names of the channels whose values over the horizon are known when a forecast is made
    (calendar, prices, plans); the network sees them. By default those that the data was prepared with; `[]` means
    none."""
    static: OptionalNames = None
    """channels without targets: names of the channels that are constant within a series, which are inputs only. By
    default those that the data was prepared with; `[]` means none."""
    masks: bool = False
    """channels: add an input for each channel: 1 where its value is present, 0 where it is missing."""
    scale: Literal["standard", "none"] = "standard"
    """channels: `standard` subtracts the mean of the training data and divides by its standard deviation, per channel;
    `none` uses the values as they are. Values to predict are scaled in the same way. The model stores what it was
    trained with, and predictions do the same, and are in the original units."""
    workers: int = Field(0, ge=0)
    """Worker processes per rank that read ahead; 0 reads in the main process."""
    cache: Folder = Path("~/.cache/stretto")
    """Folder where remote data and profiles are cached; all ranks of a node share it."""
    cache_bytes: int | None = Field(None, ge=8 << 20)
    """Maximum size of the cached data, in bytes. By default 1 GiB, or more if the lanes of a node need it."""
    retry_seconds: float = Field(300.0, ge=0, allow_inf_nan=False)
    """How long a failed request to object storage is retried, in seconds."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.factory is None and self.train is None:
            raise ValueError("train is missing; set it to the folder of the data, or set factory")
        for name in ("train", "valid", "feed"):
            if self.factory is not None and getattr(self, name) is not None:
                raise ValueError(f"{name} can't be combined with factory={self.factory!r}; leave out one or the other")
        return self

    @property
    def source(self) -> str:
        """Where the training data comes from: `train` or `factory`."""
        return self.train or self.factory or ""


class RunSettings(StrictModel):
    """Where and how a run is executed."""

    folder: Folder = Path("runs/default")
    """Folder for config, log, checkpoints and weights; if it holds a run, that run resumes."""
    seed: int = Field(1, ge=0, lt=2**63)
    """Random seed for the initial weights, the order of the data and dropout."""
    device: str = "auto"
    """Device: `auto` (an accelerator if there is one), `cpu`, `cuda`, ..."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """bf16 and fp16 run blocks under autocast; weights and losses stay fp32, states are rounded after each chunk. With
    fp16, the loss is scaled so that gradients don't overflow; a step whose gradients do is skipped."""
    tf32: bool = False
    """Use TF32 for matrix products and RNNs in fp32, on NVIDIA GPUs since Ampere: faster, but inputs are rounded to 11
    significant bits. By default fp32 is exact, unlike in torch, where cuDNN's RNNs use TF32."""
    try_layouts: int = Field(5, ge=0)
    """With `layout = "auto"`: how many of the layouts that are predicted to be fastest are tried for some steps, before
    the run, to choose the fastest (or one on fewer devices that is about as fast); 0 chooses by prediction alone."""
    log_every: int = Field(10, ge=1)
    """Steps between progress lines, if the output is not a terminal, and between the log's lines with per-rank figures.
    The log also has a line for every step."""
    eval_every: int | None = Field(None, ge=1)
    """Steps between evaluations; by default there is only one, after the last step."""
    timeout: float = Field(600.0, gt=0, allow_inf_nan=False)
    """Seconds that a rank waits for another rank before it reports that rank as lost."""
    max_restarts: int | None = Field(None, ge=0)
    """Maximum number of restarts after a lost rank; a new checkpoint resets the count. By default 3 if `stretto train`
    launches several ranks, else 0."""
    grace_seconds: int = Field(GRACE_SECONDS, ge=1)
    """How long `stretto train` waits, after SIGTERM, for the ranks that it has launched to save; then it kills them.
    Set it to a little less than what your cluster leaves between SIGTERM and SIGKILL. `stretto manifest` gives pods 10
    seconds more than this. torchrun and srun have settings of their own."""


class SaveConfig(StrictModel):
    """When and where a run saves checkpoints, and which it keeps."""

    every: int | None = Field(None, ge=1)
    """Steps between checkpoints; by default only `minutes` counts."""
    minutes: float = Field(10.0, ge=0, allow_inf_nan=False)
    """Minutes between checkpoints; with 0 only `every` counts. The last step is always saved."""
    to: Location | None = None
    """Folder or URL for checkpoints; by default `checkpoints` in the run's folder."""
    keep: int = Field(2, ge=1)
    """Number of most recent checkpoints to keep. Two always stay, so 1 means the same as 2."""
    keep_every: int | None = Field(None, ge=1)
    """Also keep the checkpoints whose step is a multiple of this."""
    keep_best: bool = False
    """Also keep the checkpoint with the lowest validation loss, or the best `metrics.monitor`; saves one at every
    evaluation."""
    verify: bool | None = None
    """Read back each checkpoint and compare its checksums before an older one is removed. By default only in a folder:
    from object storage, which checks what it receives, all bytes would come back over the network."""
    max_failures: int = Field(10, ge=1)
    """End the run after this many saves in a row that failed: it would lose all that it computes."""


class MetricsConfig(StrictModel):
    """Metrics of the evaluations, besides the loss, and the one that the run monitors."""

    names: Names = ()
    """Metrics to compute: `accuracy`, `f1` (macro) and `per_class` (a table) for classes, `mae` for values (in the
    units of the data), `entity_f1` for tags such as B-PER and I-PER of time steps, `error_rate` (of symbols),
    `word_error_rate` and `character_error_rate` for a sequence of symbols per row, or your own as `file.py:name` or
    `package.module:name`: a function of outputs and targets that returns a sum and a count, or an object of
    torchmetrics. With `model.loss = "quantile"`, `coverage` is always there: the fraction of values between the first
    and the last quantile."""
    monitor: str = "loss"
    """The metric that `train.patience`, the plateau schedule and `save.keep_best` depend on: `loss`, or the name of a
    metric."""
    mode: Literal["min", "max"] | None = None
    """Whether a lower or a higher value of `monitor` is better; by default what stretto or torchmetrics know of it."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [spec.rpartition(":")[2] for spec in self.names]
        for spec, name in zip(self.names, names, strict=True):
            if ":" not in spec and spec not in BUILT_IN_METRICS:
                remedy = suggest_name(spec, BUILT_IN_METRICS)
                raise ValueError(f"names={spec!r} is not a built-in metric, and has no file or module; {remedy}")
            if names.count(name) > 1:
                raise ValueError(f"names has two metrics called {name}; leave one out, or rename it")
        metrics = list(dict.fromkeys([*EVERY_EVALUATION, *names]))
        if self.monitor not in metrics or self.monitor == PER_CLASS:
            metrics = [name for name in metrics if name != PER_CLASS]
            raise ValueError(
                f"monitor={self.monitor!r} is not a metric of the evaluations; {suggest_name(self.monitor, metrics)}"
            )
        return self


class RunConfig(StrictModel):
    """The config of a run, one field per section of its TOML file."""

    data: DataConfig
    model: ModelConfig = ModelConfig()
    train: TrainConfig = TrainConfig()
    layout: Layout = Layout()
    run: RunSettings = RunSettings()
    save: SaveConfig = SaveConfig()
    metrics: MetricsConfig = MetricsConfig()
    sentinel: SentinelConfig = SentinelConfig()
    logging: LoggingConfig = LoggingConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.run.precision == "fp16" and (self.model.activation_penalty or self.model.temporal_penalty):
            raise ValueError(
                "run.precision='fp16' scales the loss, but not model.activation_penalty and model.temporal_penalty; "
                "use bf16 or fp32"
            )
        has_validation = self.data.valid is not None or self.data.factory is not None
        if self.metrics.names and not has_validation:
            raise ValueError("metrics.names are computed in evaluations, which need validation data; set data.valid")
        if self.evaluation_dependent is not None and (not has_validation or self.run.eval_every is None):
            remedy = "set data.valid and run.eval_every" if self.data.factory is None else "set run.eval_every"
            raise ValueError(f"{self.evaluation_dependent} depends on evaluations during the run; {remedy}")
        return self

    def public(self) -> dict[str, dict[str, Any]]:
        """Return the fields by section, as for JSON, with URLs as `scheme://host/path`: for all that may be shared."""
        sections: dict[str, dict[str, Any]] = redact(self.model_dump(mode="json"))
        return sections

    @property
    def evaluation_dependent(self) -> str | None:
        """The setting that depends on evaluations during the run, as `name=value`; None if there is none."""
        if not self.train.uses_evaluations:
            return None
        if self.train.patience is not None:
            return f"train.patience={self.train.patience}"
        return "train.schedule='plateau'" if self.train.schedule == "plateau" else "train.average='nt-asgd'"
