"""SpanModel: what all steps of a span share: the model, its loss, the layout, and which weights each layer has."""

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn

from stretto.base.device_copy import to_device
from stretto.base.window import Rows, Window
from stretto.blocks.losses import Loss
from stretto.blocks.row_loss import RowLoss
from stretto.blocks.span_program import SpanProgram
from stretto.blocks.stack import Stack
from stretto.config.layout import Layout
from stretto.engine.boundary import BoundarySpec
from stretto.engine.engine import window_tensor
from stretto.engine.precision import Precision, autocast
from stretto.engine.recorder import ActionRecorder
from stretto.mesh.mesh import Mesh
from stretto.plan.span_schedule import SweepShape, affine_sweeps


def find_sweep_shapes(program: SpanProgram) -> tuple[SweepShape, ...]:
    """Return the sweeps of a program as a schedule knows them."""
    shapes = []
    for sweep in program.sweeps:
        part = sweep.affine_part
        if part is None:
            shapes.append(SweepShape(sweep.layer, sweep.is_reverse))
        else:
            shapes.append(affine_sweeps(sweep.layer - part)[part])
    return tuple(shapes)


@dataclass(frozen=True)
class SpanModel:
    """What all steps of a span share."""

    stack: Stack
    loss: Loss
    layout: Layout
    mesh: Mesh
    precision: Precision
    recorder: ActionRecorder
    output_specs: list[BoundarySpec] = field(default_factory=list)  # that of the outputs, once it is known

    @cached_property
    def program(self) -> SpanProgram:
        """The sweeps and segments of the stack."""
        return SpanProgram.of(self.stack)

    @cached_property
    def sweep_shapes(self) -> tuple[SweepShape, ...]:
        """The sweeps as a schedule knows them."""
        return find_sweep_shapes(self.program)

    @property
    def row_loss(self) -> RowLoss | None:
        """The loss, if it is one over whole rows."""
        return self.loss if isinstance(self.loss, RowLoss) else None

    @torch.no_grad()
    def find_output_spec(self, window: Window) -> BoundarySpec:
        """Return the features and dtype of the outputs, which a span needs that has no part of a micro-batch."""
        if not self.output_specs:
            is_training = self.stack.training
            x = to_device(window_tensor(window, "inputs", self.stack.dtype)[:1, :1], self.device)
            state = self.stack.begin(Rows.of(1, 1, device=self.device, dtype=self.stack.dtype))
            with autocast(self.device, self.precision):
                y, _ = self.stack.eval()(x, state)
            self.stack.train(is_training)
            self.output_specs.append(BoundarySpec(tuple(y.shape[2:]), y.dtype))
        return self.output_specs[0]

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.mesh.world.device

    def segment_parameters(self, index: int) -> list[nn.Parameter]:
        """Return the parameters of a segment; the last one includes the loss."""
        parameters = self.program.segments[index].parameters
        if index == self.program.num_layers and self.stack.loss is not None:
            parameters = [*parameters, *self.stack.loss.parameters()]
        return parameters

    @cached_property
    def parameters_by_layer(self) -> list[list[nn.Parameter]]:
        """The parameters whose gradients are complete after the backwards of each layer; last, of the last segment.

        A weight that several layers use belongs to the first of them.
        """
        layers = dict.fromkeys(self.stack.parameters(), 0)
        for layer in reversed(range(self.program.num_layers + 1)):
            sweeps = [sweep for sweep in self.program.sweeps if sweep.layer == layer]
            used = [*self.segment_parameters(layer), *(weight for sweep in sweeps for weight in sweep.parameters)]
            layers |= dict.fromkeys(used, layer)
        return [
            [parameter for parameter, own_layer in layers.items() if own_layer == layer]
            for layer in range(self.program.num_layers + 1)
        ]
