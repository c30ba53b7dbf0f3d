"""HeadLoss: a loss of single time steps that contains the output layer, so that no tensor of all logits is needed."""

from torch import Tensor, nn

from stretto.base.errors import ConfigError, DataError
from stretto.base.window import IGNORE_INDEX
from stretto.blocks.losses import LossSum


class HeadLoss(nn.Module):
    """The base class of losses whose weights are an output layer: a model ends before it, with `num_features` outputs.

    Its weights are trained and saved as `loss.<name>`.
    """

    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__()
        if num_features < 1 or num_classes < 2:
            raise ConfigError(
                f"{type(self).__name__} has num_features={num_features} and num_classes={num_classes}; use at least 1 "
                "and 2"
            )
        self.num_features, self.num_classes = num_features, num_classes

    def forward(self, y: Tensor, targets: Tensor) -> LossSum:
        """Return the summed loss of outputs `[time, batch, features]` and targets `[time, batch]`."""
        raise NotImplementedError

    def log_prob(self, y: Tensor) -> Tensor:
        """Return the log-probability of each class, `[..., classes]`, for outputs `[..., features]`."""
        raise NotImplementedError

    def check_width(self, num_outputs: int) -> None:
        """Raise unless a model has as many outputs as this loss takes."""
        if num_outputs != self.num_features:
            raise ConfigError(
                f"{type(self).__name__} takes {self.num_features} features, but the model gives {num_outputs}; make "
                "them equal"
            )

    def check_targets(self, y: Tensor, targets: Tensor) -> None:
        """Raise unless targets are one class for each time step of the outputs, or missing."""
        self.check_width(y.shape[-1])
        if targets.is_floating_point() or y.shape[:-1] != targets.shape:
            kind = "floats" if targets.is_floating_point() else "integers"
            raise ConfigError(
                f"{type(self).__name__} takes outputs [..., features] and integer targets [...], not outputs "
                f"{list(y.shape)} and {kind} {list(targets.shape)}; use a class per time step"
            )
        # On an accelerator, the host would wait for the targets; there, torch itself stops the process.
        if targets.device.type == "cpu":
            is_wrong = ((targets < 0) & (targets != IGNORE_INDEX)) | (targets >= self.num_classes)
            if bool(is_wrong.any()):
                raise DataError(
                    f"targets have the class {int(targets[is_wrong][0])}, but {type(self).__name__} has "
                    f"{self.num_classes}, counted from 0; use {IGNORE_INDEX} where a target is missing"
                )


def check_has_output_layer(loss: object) -> None:
    """Raise if the output layer of a model belongs to its loss, so that the blocks alone don't give its outputs."""
    if isinstance(loss, HeadLoss):
        raise ConfigError(
            f"the output layer belongs to the loss, {type(loss).__name__}, which can't be exported; train with a "
            "Linear block and CrossEntropy (model.loss='cross_entropy')"
        )


def class_outputs(loss: object, y: Tensor) -> Tensor:
    """Return what metrics and predictions see: log-probabilities if the loss has the output layer, else `y` itself."""
    return loss.log_prob(y) if isinstance(loss, HeadLoss) else y
