"""Stack: layers of any kind one after another, as one recurrent module whose blocks ranks can share."""

from collections.abc import Iterable, Sequence
from itertools import islice
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from stretto.base.device_copy import to_device
from stretto.base.errors import ConfigError, LawError
from stretto.base.state import State
from stretto.base.window import Rows
from stretto.blocks.block import Block
from stretto.blocks.residual import Residual
from stretto.blocks.weight_drop import WeightDropLSTM
from stretto.parallel.layers import CallRows, Form, Inputs, Layers
from stretto.parallel.rnn import compute_dtype
from stretto.parallel.rows import Packing
from stretto.parallel.split import split_modules
from stretto.parallel.stack_stage import Place, StackStage, begin, leaves_of
from stretto.parallel.stage import prepare_layer

_MIXES_ROWS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, WeightDropLSTM)
_RANDOM = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RReLU)


class Stack(nn.ModuleList, Block):
    """Layers one after another, as one recurrent module: `y, state = stack(x, state)`. `parallelize` splits it.

    `blocks` may be causal `nn.LSTM`, `nn.GRU` and `nn.RNN`, modules that treat each time step alone (`nn.Embedding`,
    `nn.Linear`, `nn.LayerNorm`, activations, `nn.Dropout`, an `nn.Sequential` of them), and every causal
    `stretto.nn.Block`, such as `Residual(Stack([...]))`. Parameters have the names that an `nn.ModuleList` gives them.

    The state is a flat tuple of tensors [rows, ...], block by block: of an `nn.LSTM` `h` and `c` of each layer.
    """

    def __init__(self, blocks: Iterable[nn.Module], *, batch_first: bool = False) -> None:
        super().__init__(blocks)
        self.batch_first = batch_first
        self.forms: dict[Any, tuple[list[Form], list[list[Form]]]] = {}  # that calls have found
        for index, block in enumerate(self):
            for leaf in leaves_of([block]):
                if fault := _find_fault(leaf, batch_first=batch_first):
                    raise ConfigError(f"block {index} of a Stack: {type(leaf).__name__} {fault}")

    def forward(
        self, x: Tensor, state: State | None = None, *, lengths: Tensor | None = None, resets: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Run the time steps of `x`, [time, rows, ...], or with `batch_first` [rows, time, ...].

        `lengths`, [rows], are the rows' numbers of time steps: the state is the one after a row's last step, and
        outputs after it are zeros. Where `resets`, bool of [time, rows] (or [rows, time]), is true, the row's state is
        the initial one before that step. The host reads both, so keep them on the CPU.
        """
        result: tuple[Tensor, State] = self._compute(x, state, lengths, resets)
        return result

    __call__ = nn.Module.__call__  # a Block's takes no options

    def _compute(self, *arguments: Any) -> Any:  # noqa: ANN401
        return StackLayers(self).run_alone(None, *arguments)

    def initial_state(self, rows: Rows) -> State:
        return self.begin(rows)

    def begin(self, rows: Rows, carried: State | None = None) -> State:
        left, state = iter(carried or ()), list[Tensor]()
        for number, leaf in enumerate(leaves_of(self)):
            initial = begin(leaf, own := rows.for_block(number))
            before = tuple(islice(left, len(initial)))
            state += initial if carried is None or not initial else begin(leaf, own, before)
        return tuple(state)


def _find_fault(leaf: nn.Module, *, batch_first: bool) -> str:
    """Return what keeps a module out of a Stack; empty if nothing does."""
    if isinstance(leaf, nn.RNNBase) and leaf.batch_first != batch_first:
        return f"has batch_first={leaf.batch_first}; give the Stack the same"
    if leaf.bidirectional if isinstance(leaf, nn.RNNBase) else isinstance(leaf, Block) and not leaf.causal:
        return "looks ahead in time; use it outside the Stack"
    if isinstance(leaf, Block) and leaf.stride > 1:
        return "makes one time step of several; use it before the Stack"
    inner = [] if type(leaf) is Residual else [*leaf.modules()]
    if any(isinstance(each, _MIXES_ROWS) for each in inner):
        return "does not treat each row alone; use nn.LayerNorm, or nn.Dropout"
    if any(isinstance(each, _RANDOM) for each in inner) and type(leaf) is not nn.Dropout:
        return "draws random numbers of its own; use nn.Dropout, as a block or in an nn.Sequential"
    return ""


class StackInputs(Inputs):
    """The rows of a call of a Stack."""

    _is_even = False  # whether the values are [time, rows, ...]

    def __init__(
        self, layers: "StackLayers", x: Tensor, state: State | None, lengths: Tensor | None, resets: Tensor | None
    ) -> None:
        self._batch_first = layers.module.batch_first
        if x.dim() < 2:
            raise ValueError(f"Stack: expected input of at least 2 dimensions, time and rows, got {x.dim()}")
        self._layers, self._x = layers, x.transpose(0, 1) if self._batch_first else x
        self._num_times, num_rows, *shape = self._x.shape
        self.form, self.device, self.width = Form(tuple(shape), x.dtype), x.device, prod(shape)
        is_cast = torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64
        self.dtype = torch.get_autocast_dtype(x.device.type) if is_cast else x.dtype
        self.lengths = torch.full((num_rows,), self._num_times) if lengths is None else lengths.cpu().long()
        if self.lengths.shape != (num_rows,) or not all(0 <= each <= self._num_times for each in self.lengths.tolist()):
            raise ValueError(f"Stack: expected {num_rows} lengths of at most {self._num_times}, got {lengths}")
        self.is_dense = not num_rows or bool((self.lengths == self.lengths[0]).all())
        if resets is not None:
            resets = (resets.transpose(0, 1) if self._batch_first else resets).cpu()
            if resets.shape != self._x.shape[:2] or resets.dtype != torch.bool:
                raise ValueError(
                    f"Stack: expected bool resets of {tuple(self._x.shape[:2])}, got {tuple(resets.shape)}"
                )
            self.resets = resets.nonzero()
        self.has_state, self._state = state is not None, [] if state is None else self._read_state(state)
        tensors = (x, *self._state, *layers.module.parameters())
        self.needs_grad = any(tensor.requires_grad for tensor in tensors)

    def _read_state(self, state: State) -> list[Tensor]:
        forms = [form for block in self._layers.forms(self)[1] for form in block]
        expected = [(len(self.lengths), *form.shape) for form in forms]
        if (shapes := [tuple(tensor.shape) for tensor in state]) != expected:
            raise ValueError(f"Stack: expected a state of {expected}, got {shapes}")
        return [tensor.to(form.dtype) for tensor, form in zip(state, forms, strict=True)]

    @property
    def _positions(self) -> Tensor:
        """Where values row by row are in [rows, time]."""
        is_valid = torch.arange(self._num_times) < self.lengths[:, None]
        return to_device(is_valid.flatten().nonzero().squeeze(1), self.device)

    def zeros(self) -> Tensor:
        """Return one step of zeros."""
        return torch.zeros(1, *self.form.shape, dtype=self.form.dtype, device=self.device)

    def values(self, *, is_even: bool) -> Tensor:
        self._is_even = is_even
        if is_even:
            return self._x[: self.longest]
        return self._x.transpose(0, 1).flatten(0, 1).index_select(0, self._positions)

    def all_state(self) -> list[Tensor]:
        rows = Rows.of(len(self.lengths), device=self.device, dtype=self._layers.like.dtype)
        return self._state if self.has_state else [*self._layers.module.begin(rows)]

    def as_output(self, y: Tensor, state: Sequence[Tensor]) -> tuple[Tensor, State]:
        num_rows = len(self.lengths)
        if not num_rows:
            y = y.reshape(self._num_times, 0, *y.shape[2 if self._is_even else 1 :])
        elif self._is_even:
            y = pad(y, (0, 0) * (y.dim() - 1) + (0, self._num_times - len(y))) if len(y) < self._num_times else y
        else:
            whole = y.new_zeros(num_rows * self._num_times, *y.shape[1:]).index_copy(0, self._positions, y)
            y = torch.unflatten(whole, 0, (num_rows, self._num_times))
            y = y.transpose(0, 1)
        return y.transpose(0, 1).clone() if self._batch_first else y.contiguous(), tuple(state)


class StackLayers(Layers):
    """The blocks of a Stack."""

    module: Stack

    def __init__(self, stack: Stack) -> None:
        self.module, self._blocks = stack, [*stack]
        self.num_layers = len(self._blocks)
        weights = (weight for weight in stack.parameters() if weight.is_floating_point())
        self.like = next(weights, torch.empty(0))  # has the device and the dtype of the state
        self.is_random = stack.training and any(_is_random(leaf) for leaf in leaves_of(stack))

    @property
    def parameters(self) -> list[list[Place]]:
        return [_places(block) for block in self._blocks]

    @property
    def costs(self) -> list[float]:
        """The numbers of multiplications of a step, about; the rows of a table are only read."""
        tables = (nn.Embedding, nn.EmbeddingBag)
        return [
            1.0 + sum(getattr(owner, name).numel() for owner, name in block if not isinstance(owner, tables))
            for block in self.parameters
        ]

    def forms(self, inputs: Inputs) -> tuple[list[Form], list[list[Form]]]:
        assert isinstance(inputs, StackInputs)
        key = (inputs.form, inputs.dtype, self.like.dtype)
        if key not in self.module.forms:
            with torch.no_grad():
                self.module.forms[key] = self._find_forms(inputs)
        return self.module.forms[key]

    def _find_forms(self, inputs: StackInputs) -> tuple[list[Form], list[list[Form]]]:
        """Run one step of one row."""
        rows, steps = CallRows(packing=Packing([torch.ones(1, dtype=torch.int64)]), seeds=[]), inputs.zeros()
        between, states = [_form_of(steps)], []
        split = split_modules.get(self.module)  # then weights of other ranks are missing: zeros take no memory
        for index, block in enumerate(self._blocks):
            shapes = split.shapes[index] if split else {}
            places: list[Place] = [
                (self.module.get_submodule(n.rpartition(".")[0]), n.rpartition(".")[2]) for n in shapes
            ]
            weights = [self.like.new_zeros(()).expand(shape) for shape in shapes.values()]
            stage = StackStage([block], index, places, weights, rows, self.like)
            state = stage.begin([])
            steps, after = stage(steps, rows.packing.chunks(1)[0], state)
            between.append(_form_of(steps))
            states.append([_form_of(tensor) for tensor in state])
            if states[-1] != (changed := [_form_of(tensor) for tensor in after]):
                raise LawError(f"block {index} of a Stack turns a state of {states[-1]} into one of {changed}")
        return between, states

    def read(self, *arguments: Any) -> StackInputs:  # noqa: ANN401
        return StackInputs(self, *arguments)

    def prepare(self, layer: int, weights: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        places = _places(self._blocks[layer])
        prepared = {place: weight.view_as(weight) for place, weight in zip(places, weights, strict=True)}
        for rnn in (leaf for leaf in leaves_of([self._blocks[layer]]) if isinstance(leaf, nn.RNNBase)):
            for index, names in enumerate(rnn._all_weights):
                own: list[Place] = [(rnn, name) for name in names]
                if all(place in prepared for place in own):  # not computed from others, as by torch's parametrizations
                    values = [prepared[place] for place in own]
                    values = prepare_layer(rnn, index, values, compute_dtype(rnn, values[0]))
                    prepared |= zip(own, values, strict=True)
        return [prepared[place] for place in places]

    def stage(self, layers: range, weights: Sequence[Sequence[Tensor]], rows: CallRows) -> StackStage:
        blocks = self._blocks[layers.start : layers.stop]
        first = sum(1 for _ in leaves_of(self._blocks[: layers.start]))
        places = [place for block in blocks for place in _places(block)] if weights else []
        return StackStage(blocks, first, places, [each for layer in weights for each in layer], rows, self.like)

    def run_alone(self, seed: int | None, *arguments: Any) -> tuple[Tensor, State]:  # noqa: ANN401
        inputs = self.read(*arguments)
        seed = self.draw_seed() if seed is None else seed
        if not inputs.num_steps:  # what follows needs the shape, and DDP all gradients
            one = CallRows(packing=Packing([torch.ones(1, dtype=torch.int64)]), seeds=[seed])
            y, _ = self.run([], one, inputs.zeros(), [])
            return inputs.as_output(y[:0], inputs.all_state())
        packing = Packing([inputs.lengths])
        rows = CallRows(packing=packing, seeds=[seed], resets=[inputs.resets] * (len(inputs.resets) > 0))
        steps = packing.pack([inputs.values(is_even=packing.is_even)])
        y, state = self.run([], rows, steps, inputs.all_state() if inputs.has_state else [])
        return inputs.as_output(packing.unpack(y)[0], state)


def _is_random(leaf: nn.Module) -> bool:
    """Return whether a leaf may need a seed."""
    if isinstance(leaf, nn.RNNBase):
        return leaf.dropout > 0
    return leaf.p > 0 if isinstance(leaf, nn.Dropout) else isinstance(leaf, Block) and type(leaf) is not Residual


def _places(block: nn.Module) -> list[Place]:
    owners = block.modules()
    return [(owner, name) for owner in owners for name, weight in owner._parameters.items() if weight is not None]


def _form_of(tensor: Tensor) -> Form:
    return Form(tuple(tensor.shape[1:]), tensor.dtype)
