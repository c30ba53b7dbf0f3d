"""AffineGraph: an affine block over one span, which runs before the state at the span's start is known.

    x ─────►┌─────────┐
            │   run   │            all spans at once
            └────┬────┘
    state ──►   map   ──► after    the state at the start of the next span, at once: the map is small
            ┌────┴────┐
            │ correct │──► y       all spans at once
            └─────────┘

Gradients come back the same way. That of the state is the sum of two: one through the outputs, which all spans compute
at once, and one through the map from the gradient of `after`. It is sent on before the backward of the run.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from stretto.base.state import State, detach
from stretto.blocks.affine import AffineMap, AffineRun
from stretto.engine.cut_graph import find_gradients, make_leaf


class AffineGraph:
    """A block's `run`; then `pass_on` and `correct`; in the backward `begin_backward`, `pass_back` and `backward`.

    With `recompute`, the run has no graph at first, and is repeated by `begin_backward`.
    """

    def __init__(
        self,
        run: Callable[[Tensor], AffineRun],
        x: Tensor,
        context: Callable[[], AbstractContextManager[object]],
        *,
        has_backward: bool,
        recompute: bool,
    ) -> None:
        self._run_affine, self._context = run, context
        self._x = make_leaf(x, x.requires_grad)
        self._has_backward, self._has_graph = has_backward, has_backward and not recompute
        self.state: State = ()  # at the span's start
        self.after: State = ()  # at its end
        self._outputs: list[Tensor] = []  # y and the state after, with their graph
        self._gradients: list[Tensor | None] = []  # of the outputs
        self._state_gradients: list[Tensor | None] = []  # of the state, through y
        self._run: AffineRun | None = self._start(has_graph=self._has_graph)
        state_map = self._run.state_map
        # Without its graph: the gradients of the map's own tensors come from the outputs.
        self._map: AffineMap = state_map.with_tensors(detach(state_map.tensors))

    def _start(self, *, has_graph: bool) -> AffineRun:
        with torch.set_grad_enabled(has_graph), self._context():
            return self._run_affine(self._x)

    def pass_on(self, state: State) -> State:
        """Take the state at the span's start; return the state after the span."""
        self.state = tuple(make_leaf(t, t.requires_grad) if t.is_leaf else t for t in state)
        with torch.no_grad(), self._context():
            self.after = self._map(self.state)
        return self.after

    def correct(self) -> Tensor:
        """Return the outputs, without their graph."""
        run, self._run = self._run, None
        assert run is not None
        with torch.set_grad_enabled(self._has_graph), self._context():
            y, after = run.finish(self.state)
        if self._has_graph:
            self._outputs = [y, *after]
        return make_leaf(y, y.requires_grad if self._has_graph else self._has_backward)

    def begin_backward(self, gradient: Tensor | None) -> None:
        """Take the gradient of the outputs; find that of the state through them."""
        if not self._has_graph:
            run = self._start(has_graph=True)
            with torch.enable_grad(), self._context():
                y, after = run.finish(self.state)
            self._outputs = [y, *after]
        self._gradients = [gradient]
        self._state_gradients = find_gradients(self._outputs[:1], [gradient], self.state, keep_graph=True)

    def pass_back(self, after_gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Take the gradient of the state after the span; return that of the state at its start."""
        self._gradients += after_gradients
        with torch.enable_grad(), self._context():
            after = self._map(self.state)
        through_map = find_gradients(after, after_gradients, self.state)
        return [add_gradients(*pair) for pair in zip(self._state_gradients, through_map, strict=True)]

    def backward(self, parameters: Sequence[nn.Parameter]) -> tuple[Tensor | None, list[Tensor | None]]:
        """Return the gradients of the input and of the parameters. Frees the graph."""
        outputs, self._outputs = self._outputs, []
        input_gradient, *gradients = find_gradients(outputs, self._gradients, [self._x, *parameters])
        return input_gradient, gradients


def add_gradients(total: Tensor | None, term: Tensor | None) -> Tensor | None:
    """Return the sum of two gradients, each of which may be missing."""
    return total if term is None else term if total is None else total + term
