"""RowDecoder: turns the outputs of whole rows into names: the symbols of CTC, or the tags of a CRF."""

from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.base.errors import ConfigError
from stretto.base.task import has_own_length
from stretto.blocks.crf import CRF
from stretto.blocks.ctc_decoding import ctc_beam_search, ctc_greedy
from stretto.blocks.row_loss import RowLoss
from stretto.train.trained_model import TrainedModel


@dataclass(frozen=True)
class DecodedRow:
    """What a row's outputs stand for."""

    names: list[str]
    log_probability: float | None = None  # with a beam: of all paths in the beam that stand for these symbols


@dataclass(frozen=True)
class RowDecoder:
    """Decodes rows one by one: with the transitions of a CRF, or as CTC outputs if there is none."""

    names: tuple[str, ...]  # of the classes
    crf: CRF | None = None
    beam: int | None = None  # CTC: the width of the beam; None: take the most likely path

    @torch.no_grad()
    def decode(self, y: Tensor) -> DecodedRow:
        """Return the names that a row's outputs `[time, classes]` stand for."""
        if self.crf is not None:
            # Not `crf.to(y.device)`, which would move the loss of the model itself.
            y = y.to(self.crf.transitions.device)
            return self._named(self.crf.decode(y.unsqueeze(1), torch.tensor([len(y)])).squeeze(1).tolist())
        if self.beam is None:
            return self._named(ctc_greedy(y))
        best = ctc_beam_search(y, self.beam)[0]
        return DecodedRow([self.names[label] for label in best.labels], best.log_probability)

    def _named(self, labels: list[int]) -> DecodedRow:
        return DecodedRow([self.names[label] for label in labels])


def find_row_decoder(trained: TrainedModel, beam: int | None = None) -> RowDecoder | None:
    """Return the decoder of a model that was trained with a loss over whole rows; None for single time steps.

    `beam` is the width of the beam for CTC; by default, the most likely path is decoded.
    """
    loss, task, config = trained.stack.loss, trained.data_spec.task, trained.config.model
    is_ctc = has_own_length(task.targets) and not config.has_own_loss
    if beam is not None and not is_ctc:
        raise ConfigError(f"beam={beam} is for models that were trained with model.loss='ctc'; leave it out")
    if beam is not None and beam < 1:
        raise ConfigError(f"beam={beam} is less than 1; use at least 1, such as 16")
    names = trained.data_spec.labels or tuple(map(str, range(task.num_outputs)))
    if is_ctc:
        return RowDecoder(names, beam=beam)
    if isinstance(loss, CRF):
        return RowDecoder(names, crf=loss)
    if has_own_length(task.targets) or isinstance(loss, RowLoss):
        raise ConfigError(
            f"the model was trained with a loss of your own over whole rows (model.loss={config.loss!r}), which only "
            "you can decode; run trained.stack, and decode its outputs"
        )
    return None
