"""The [model] section: the network."""

from typing import Literal, Self

from pydantic import Field, model_validator

from stretto.base.strict_model import StrictModel


class ModelConfig(StrictModel):
    """A recurrent network: an embedding for tokens, recurrent layers, and a head for the targets of the data."""

    factory: str | None = None
    """Your own model, as `file.py:function` or `package.module:function`; the function takes a `stretto.data.Task` and
    returns a Stack."""
    loss: str | None = None
    """Your own loss, as `file.py:function` or `package.module:function`; the function takes outputs and targets and
    returns a LossSum."""
    weights: str | None = None
    """File with initial weights, from `stretto.exchange.save_weights` or another run; by default weights are random.
    Blocks that have weights are matched in order. The file is not read again when the run resumes."""
    cell: Literal["lstm", "gru"] = "lstm"
    """The recurrent cell."""
    layers: int = Field(2, ge=1)
    """Number of recurrent layers."""
    layers_per_block: int = Field(1, ge=1)
    """Recurrent layers per block; a block is never split between stages."""
    hidden: int = Field(256, ge=1)
    """Size of the hidden state."""
    embedding: int | None = Field(None, ge=1)
    """Size of the token embedding (default: `projection`, else `hidden`). With channels: size of a linear layer before
    the first recurrent layer; by default there is none."""
    projection: int | None = Field(None, ge=1)
    """Size that an LSTM projects its outputs to (torch's `proj_size`); by default there is no projection."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Probability of zeroing a feature, after the embedding and after each recurrent block."""
    locked_dropout: bool = True
    """Zero the same features at all time steps of a window (variational dropout), not new ones at each time step."""
    residual: bool = False
    """Add the input of each recurrent block to its output, where the sizes match."""
    norm: bool = False
    """Apply layer normalization after each recurrent block."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.projection is not None and self.cell == "gru":
            raise ValueError(f"projection={self.projection} needs cell='lstm'; remove projection")
        if self.projection is not None and self.projection >= self.hidden:
            raise ValueError(f"projection={self.projection} must be less than hidden={self.hidden}; make it smaller")
        return self

    @property
    def output_size(self) -> int:
        """The number of features that a recurrent layer outputs."""
        return self.projection or self.hidden

    @property
    def embedding_size(self) -> int:
        """The size of the token embedding."""
        return self.embedding or self.output_size

    @property
    def block_layer_counts(self) -> list[int]:
        """The number of layers of each recurrent block; the last block may have fewer than the others."""
        starts = range(0, self.layers, self.layers_per_block)
        return [min(self.layers_per_block, self.layers - start) for start in starts]
