"""The model section: which network."""

from typing import Literal, Self

from pydantic import Field, model_validator

from stretto.base.strict_model import StrictModel


class ModelConfig(StrictModel):
    """A recurrent network: an embedding for tokens, recurrent layers, a head for what the data asks."""

    factory: str | None = None
    """Your own model instead of this one: `file.py:function`, called with a `stretto.data.Task`, returns a Stack."""
    loss: str | None = None
    """Your own loss: `file.py:function`, called with outputs and targets, returns a LossSum."""
    weights: str | None = None
    """Weights to begin with instead of drawing them by seed: a file of `stretto.exchange.save_weights`, or of another run; they
    are given to the blocks that have weights, in order, and are not read again when the run goes on."""
    cell: Literal["lstm", "gru"] = "lstm"
    """The recurrent cell."""
    layers: int = Field(2, ge=1)
    """How many recurrent layers."""
    layers_per_block: int = Field(1, ge=1)
    """How many layers are fused into one block; a stage can be cut only between blocks."""
    hidden: int = Field(256, ge=1)
    """Features of a layer's hidden state."""
    embedding: int | None = Field(None, ge=1)
    """Features of a token's vector; `hidden` (or `projection`) if not given."""
    projection: int | None = Field(None, ge=1)
    """Features to which an LSTM projects its outputs; none if not given."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Probability of a feature being zeroed after the embedding and after each block."""
    locked_dropout: bool = True
    """Zero the same features at every step of a window, rather than anew at each step."""
    residual: bool = False
    """Add each recurrent block's input to its output where the widths allow it."""
    norm: bool = False
    """Normalise the features after each recurrent block."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.projection is not None and self.cell == "gru":
            raise ValueError(f"projection={self.projection} needs cell='lstm', a GRU has none; leave it out")
        if self.projection is not None and self.projection >= self.hidden:
            raise ValueError(f"projection={self.projection} must be less than hidden={self.hidden}; make it smaller")
        return self

    @property
    def output_size(self) -> int:
        return self.projection or self.hidden

    @property
    def embedding_size(self) -> int:
        return self.embedding or self.output_size

    @property
    def layers_of_blocks(self) -> list[int]:
        """How many layers each recurrent block holds."""
        full, rest = divmod(self.layers, self.layers_per_block)
        return [self.layers_per_block] * full + [rest] * bool(rest)
