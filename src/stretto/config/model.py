"""The [model] section: the network."""

from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from stretto.base.strict_model import StrictModel
from stretto.config.layout import Counts


def _parse_numbers(value: object) -> object:
    """Convert the text `0.1,0.9` of a command-line option to a tuple; return anything else unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return tuple(map(float, filter(None, value.split(","))))
    except ValueError:
        raise ValueError(f"{value!r} is not a list of numbers; separate them with commas, as in 0.1,0.9") from None


Numbers = Annotated[tuple[float, ...], Field(strict=False), BeforeValidator(_parse_numbers)]

# The losses that `model.loss` can name, and the fields that only one of them uses.
LOSS_NAMES = (
    "cross_entropy",
    "adaptive_softmax",
    "crf",
    "ctc",
    "binary_cross_entropy",
    "mse",
    "mae",
    "huber",
    "quantile",
)
_LOSS_OF_FIELD = {
    "class_weights": "cross_entropy",
    "label_smoothing": "cross_entropy",
    "adaptive_cutoffs": "adaptive_softmax",
    "huber_delta": "huber",
    "quantiles": "quantile",
}


class ModelConfig(StrictModel):
    """A recurrent network: an embedding for tokens, recurrent layers, and a head for the targets of the data."""

    factory: str | None = None
    """Your own model, as `file.py:function` or `package.module:function`; the function takes a `stretto.data.Task` and
    returns a Stack."""
    loss: str | None = None
    """The loss: `cross_entropy`, `adaptive_softmax` (for a large vocabulary sorted by frequency), `crf` (classes
    per time step), `ctc` (a sequence of classes per row), `binary_cross_entropy`, `mse`, `mae`, `huber`, `quantile`, or
    your own, as `file.py:function` or `package.module:function`: the function takes outputs and targets and returns a
    LossSum. By default cross-entropy for tokens and classes, CTC for a sequence of classes per row, and the squared
    error for values."""
    class_weights: Numbers = ()
    """cross_entropy: the weight of each class, in the order of the classes; by default all are equal."""
    label_smoothing: float = Field(0.0, ge=0, le=1)
    """cross_entropy: share of each target that is spread over all classes."""
    adaptive_cutoffs: Counts = ()
    """adaptive_softmax: the first class of each cluster of rarer classes, in increasing order; by default after a tenth
    and a third of the classes."""
    huber_delta: float = Field(1.0, gt=0, allow_inf_nan=False)
    """huber: the error above which the loss is linear."""
    quantiles: Numbers = (0.1, 0.5, 0.9)
    """quantile: the quantiles to predict for each value, in increasing order. The interval between the first and the
    last is the one whose coverage is reported."""
    weights: str | None = None
    """File with initial weights, from `stretto.exchange.save_weights` or another run; by default weights are random.
    Blocks that have weights are matched in order. The file is not read again when the run resumes."""
    cell: Literal["lstm", "gru", "mingru", "minlstm", "mlstm", "slstm"] = "lstm"
    """The recurrent cell: torch's LSTM or GRU; a minimal GRU or LSTM or the mLSTM of the xLSTM, which compute many
    time steps at once; or the sLSTM of the xLSTM."""
    heads: int = Field(4, ge=1)
    """mlstm and slstm: number of heads, each with as many features of the hidden state; `hidden` must be a multiple.
    """
    layers: int = Field(2, ge=1)
    """Number of recurrent layers."""
    layers_per_block: int = Field(1, ge=1)
    """Recurrent layers per block; a block is never split between stages."""
    hidden: int = Field(256, ge=1)
    """Size of the hidden state."""
    embedding: int | None = Field(None, ge=1)
    """Size of the token embedding (default: `projection`, else `hidden`). With channels: size of a linear layer before
    the first recurrent layer; by default there is none."""
    stack_frames: int = Field(1, ge=1)
    """With channels: join the features of this many time steps into one before the first layer, so that the layers run
    on fewer time steps. Only for targets of whole rows: a sequence of classes, or one target per row."""
    projection: int | None = Field(None, ge=1)
    """Size that an LSTM projects its outputs to (torch's `proj_size`); by default there is no projection."""
    tied: bool = False
    """For a language model: the output layer uses the weight of the token embedding, which must have the size of the
    last recurrent layer's output."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Probability of zeroing a feature, after the embedding and after each recurrent block."""
    locked_dropout: bool = True
    """Zero the same features at all time steps of a window (variational dropout), not new ones at each time step."""
    weight_dropout: float = Field(0.0, ge=0, lt=1)
    """Probability of zeroing a recurrent weight of an LSTM, the same ones in a whole step (weight drop, as in the
    AWD-LSTM)."""
    embedding_dropout: float = Field(0.0, ge=0, lt=1)
    """Probability of zeroing the embedding of a token, the same ones in a whole step."""
    activation_penalty: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Weight of a penalty on the mean square of the last recurrent layer's outputs, after dropout (AR)."""
    temporal_penalty: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Weight of a penalty on the mean square of their change from one time step to the next, before dropout (TAR).
    Neither penalty is in the loss that is reported."""
    residual: bool = False
    """Add the input of each recurrent block to its output, where the sizes match."""
    norm: bool = False
    """Apply layer normalization after each recurrent block."""
    bidirectional: bool = False
    """Read each row in both directions; each direction has `hidden` features. Only for targets that are not later
    inputs, such as labels. `layout.spans` splits a window's time over ranks."""
    pooling: Literal["final", "mean", "max"] = "final"
    """For one label per row, what the last layer reads of the row: the final outputs (of both directions), or the mean
    or the maximum over its time steps."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_cell()
        if self.projection is not None and self.cell != "lstm":
            raise ValueError(f"projection={self.projection} needs cell='lstm'; remove projection")
        if self.projection is not None and self.projection >= self.hidden:
            raise ValueError(f"projection={self.projection} must be less than hidden={self.hidden}; make it smaller")
        if self.projection is not None and self.bidirectional:
            raise ValueError(f"projection={self.projection} can't be combined with bidirectional; remove one of them")
        if self.tied and self.embedding_size != self.output_size:
            raise ValueError(
                f"tied=true needs equal sizes, but the embedding has {self.embedding_size} features and the last "
                f"recurrent layer {self.output_size}; set embedding={self.output_size}, or projection"
            )
        if self.tied and self.loss == "adaptive_softmax":
            raise ValueError(
                "tied=true can't be combined with loss='adaptive_softmax', which has no such table; remove one of them"
            )
        if self.weight_dropout and (self.cell != "lstm" or self.bidirectional):
            raise ValueError(f"weight_dropout={self.weight_dropout} needs cell='lstm' in one direction; remove it")
        self._check_loss()
        return self

    def _check_cell(self) -> None:
        has_heads = self.cell in ("mlstm", "slstm")
        if has_heads and self.hidden % self.heads:
            raise ValueError(f"hidden={self.hidden} is not a multiple of heads={self.heads}; change one of them")
        if not has_heads and self.heads != type(self).model_fields["heads"].default:
            raise ValueError(f"heads={self.heads} needs cell='mlstm' or 'slstm', not {self.cell!r}; leave it out")
        if self.bidirectional and self.cell not in ("lstm", "gru"):
            raise ValueError(f"bidirectional=true needs cell='lstm' or 'gru', not {self.cell!r}; change one of them")

    def _check_loss(self) -> None:
        if self.loss is not None and not self.has_own_loss and self.loss not in LOSS_NAMES:
            raise ValueError(
                f"loss={self.loss!r} is not known; choose from {', '.join(LOSS_NAMES)}, or write file.py:function"
            )
        for name, loss in _LOSS_OF_FIELD.items():
            value = getattr(self, name)
            # Without a loss, the data decides whether it is the cross-entropy.
            is_used = self.loss == loss or (self.loss is None and loss == "cross_entropy")
            if value != type(self).model_fields[name].default and not is_used:
                raise ValueError(f"{name}={value} needs loss={loss!r}, not {self.loss!r}; leave it out")
        is_increasing = all(low < high for low, high in pairwise(self.quantiles))
        if not self.quantiles or not is_increasing or not 0 < self.quantiles[0] <= self.quantiles[-1] < 1:
            raise ValueError(
                f"quantiles={list(self.quantiles)} must be between 0 and 1, in increasing order; use values such as "
                "0.1, 0.5, 0.9"
            )

    @property
    def has_own_loss(self) -> bool:
        """Whether `loss` names Python code."""
        return self.loss is not None and ":" in self.loss

    @property
    def predicted_quantiles(self) -> tuple[float, ...]:
        """The quantiles that the model predicts for each value; empty if it predicts one number."""
        return self.quantiles if self.loss == "quantile" else ()

    @property
    def outputs_per_target(self) -> int:
        """The number of outputs that the loss needs for each value or class."""
        return len(self.predicted_quantiles) or 1

    @property
    def output_size(self) -> int:
        """The number of features that a recurrent layer outputs, in both directions together."""
        return 2 * self.hidden if self.bidirectional else self.projection or self.hidden

    @property
    def embedding_size(self) -> int:
        """The size of the token embedding."""
        return self.embedding or self.projection or self.hidden

    @property
    def block_layer_counts(self) -> list[int]:
        """The number of layers of each recurrent block; the last block may have fewer than the others."""
        starts = range(0, self.layers, self.layers_per_block)
        return [min(self.layers_per_block, self.layers - start) for start in starts]
