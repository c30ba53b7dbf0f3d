"""ReplicaEngine: adds data parallelism to any engine, with the reducer of torch's DDP."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from stretto.base.state import State
from stretto.base.window import Window
from stretto.engine.ddp_reducer import prepare_for_backward, rebuild_buckets
from stretto.engine.engine import BeforeLastBackward, Engine, OnOutputs, StepResult, describe_engine, no_op
from stretto.mesh.mesh import Mesh
from stretto.mesh.reduction import ReduceHookState, all_reduce_hook


class ReplicaEngine:
    """Sums an engine's gradients over the replicas, once per step, for any number of micro-batches and chunks.

    DDP is used for its reducer only; its `forward` is never called. The reducer is prepared just before the step's last
    backward, and all-reduces its buckets while that backward runs:

        time ->   F0  F1  F2  B2  B1  B0 ------------
                                      |    bucket 0: all-reduce ------
                          prepare here|        bucket 1: all-reduce ------

    In a pipeline, the gradients of each stage are summed over the ranks that hold that stage.
    """

    def __init__(self, engine: Engine, mesh: Mesh, *, has_equal_weights: bool) -> None:
        self.engine = engine
        self.mesh = mesh
        self.stack = engine.stack
        self.is_causal = engine.is_causal
        self.stride = engine.stride
        self.unsummarized = engine.unsummarized
        self.model_input = engine.model_input
        self.row_loss = engine.row_loss
        self.has_whole_rows = engine.has_whole_rows
        self.num_micro_batches = engine.num_micro_batches
        self.reads_targets = engine.reads_targets
        self.reads_inputs = engine.reads_inputs
        self.tied_weights = engine.tied_weights
        self.precision = engine.precision
        self.recorder = engine.recorder
        assert mesh.replica_group is not None
        self._ddp: DistributedDataParallel | None = None
        # A stage may have no weights, and so nothing to reduce.
        if any(parameter.requires_grad for parameter in self.stack.parameters()):
            self._ddp = DistributedDataParallel(
                self.stack,
                process_group=mesh.replica_group,
                # Weights drawn from a seed are equal already; others are copied from the first replica.
                init_sync=not has_equal_weights,
                gradient_as_bucket_view=True,
            )
            hook_state = ReduceHookState(mesh.replica_group, mesh.world.wait_timer, mesh.local_gradients)
            self._ddp.register_comm_hook(hook_state, all_reduce_hook)
            self._settle_buckets()

    def __repr__(self) -> str:
        return describe_engine(self)

    def step(
        self,
        window: Window,
        carried: State | None,
        key: int,
        before_last_backward: BeforeLastBackward = no_op,
        loss_scale: float = 1.0,
    ) -> StepResult:
        """Run this replica's step and sum the gradients over all replicas. `before_last_backward` is ignored."""
        if self._ddp is not None:
            # As DDP's forward does. The buckets are fixed, so this only checks that the previous step was reduced.
            rebuild_buckets(self._ddp)
        # Buckets are reduced during the backward, so a lost replica raises an error in the backward.
        with self.mesh.world.explain_errors("reducing gradients"):
            result = self.engine.step(window, carried, key, self._prepare_reducer, loss_scale)
        self.mesh.world.wait_timer.end_all_reduce()
        return result

    def eval_step(
        self, window: Window, carried: State | None, key: int, on_outputs: OnOutputs | None = None
    ) -> StepResult:
        """Run forward only, without dropout and without gradients."""
        return self.engine.eval_step(window, carried, key, on_outputs)

    def squared_grad_norm(self) -> Tensor:
        """Return this rank's equal share of the squared gradient norm: all replicas have the same gradient."""
        return self.engine.squared_grad_norm() / self.mesh.num_copies

    def _prepare_reducer(self) -> Sequence[Tensor]:
        if self._ddp is None:
            return ()
        prepare_for_backward(self._ddp)
        # In the order in which gradients are ready: last blocks first.
        parameters = [parameter for parameter in self.stack.parameters() if parameter.requires_grad][::-1]
        ready_signal: Tensor = _ReadyWithoutGradient.apply(*parameters)  # type: ignore[no-untyped-call]
        return (ready_signal,)

    def _settle_buckets(self) -> None:
        """Run an empty backward, after which the reducer fixes which parameters share a bucket.

        Otherwise it would do so after the first step, and again after the first step of a resumed run. With three or
        more replicas the order of summation depends on the buckets, so a resumed run would differ in the last bits.
        """
        assert self._ddp is not None
        torch.autograd.backward(self._prepare_reducer())
        self.mesh.world.wait_timer.end_all_reduce()
        rebuild_buckets(self._ddp)
        self.stack.zero_grad(set_to_none=True)


class _ReadyWithoutGradient(torch.autograd.Function):
    """A zero that depends on all parameters and gives none of them a gradient.

    The reducer all-reduces a bucket once the backward has reached all its parameters. With this zero as a root, the
    last backward also reaches parameters that its chunk doesn't use. Otherwise their buckets would never be reduced.
    """

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:  # noqa: ANN401
        ctx.num_parameters = len(parameters)
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:  # noqa: ANN401
        return (None,) * int(ctx.num_parameters)
