"""ReplicaEngine: data parallel around any engine, with torch's own reducer."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from stretto.base.state import State
from stretto.base.window import Window
from stretto.blocks.stack import Stack
from stretto.engine.engine import BeforeLastBackward, Engine, StepResult, no_op
from stretto.mesh.mesh import Mesh
from stretto.mesh.reduction import ReduceHookState, all_reduce_hook
from stretto.plan.timeline import TimedAction


class ReplicaEngine:
    """Adds up gradients over the replicas of an engine: once a step, however many micro-batches and chunks it took.

    The reducer is armed just before the step's last backward, and its buckets travel while that one runs. Around a
    pipeline this is the hybrid: each stage is reduced among the ranks that hold it.
    """

    def __init__(self, inner: Engine, mesh: Mesh, *, is_synced: bool) -> None:
        self.inner = inner
        self.mesh = mesh
        assert mesh.replica_group is not None
        self._reducer: DistributedDataParallel | None = None
        # A stage may be without weights: then there is nothing to add up.
        if any(parameter.requires_grad for parameter in inner.stack.parameters()):
            self._reducer = DistributedDataParallel(
                inner.stack,
                process_group=mesh.replica_group,
                # Weights drawn by seed and name are equal already; others are spread from the first replica.
                init_sync=not is_synced,
                forward_sync_buffers=False,
                gradient_as_bucket_view=True,
            )
            self._reducer.register_comm_hook(
                ReduceHookState(mesh.replica_group, mesh.world.wait_timer), all_reduce_hook
            )
            self._settle_buckets()

    @property
    def stack(self) -> Stack:
        return self.inner.stack

    @property
    def device(self) -> torch.device:
        return self.inner.device

    @property
    def is_causal(self) -> bool:
        return self.inner.is_causal

    @property
    def needs_inputs(self) -> bool:
        return self.inner.needs_inputs

    @property
    def needs_targets(self) -> bool:
        return self.inner.needs_targets

    @property
    def num_replicas(self) -> int:
        return self.mesh.num_replicas

    @property
    def replica(self) -> int:
        return self.mesh.replica

    @property
    def num_micro_batches(self) -> int:
        return self.inner.num_micro_batches

    @property
    def stage(self) -> int:
        return self.inner.stage

    @property
    def wait_seconds(self) -> float:
        return self.mesh.world.wait_timer.seconds

    @property
    def recorded_actions(self) -> list[TimedAction] | None:
        return self.inner.recorded_actions

    @recorded_actions.setter
    def recorded_actions(self, recorded_actions: list[TimedAction] | None) -> None:
        self.inner.recorded_actions = recorded_actions

    def step(
        self, window: Window, carried: State | None, key: int, before_last_backward: BeforeLastBackward = no_op
    ) -> StepResult:
        """Run this replica's step; leave the gradient summed over all replicas in the parameters' `.grad`."""
        if self._reducer is not None:
            # What DDP's own forward would do: settle the buckets once the order of gradients is known.
            self._reducer.reducer._rebuild_buckets()
        # Buckets are reduced inside the backward, so a lost replica shows as an error of the backward.
        with self.mesh.world.explain_errors("reducing gradients"):
            outcome = self.inner.step(window, carried, key, self._prepare_reducer)
        self.mesh.world.wait_timer.end_all_reduce()
        return outcome

    def eval_step(self, window: Window, carried: State | None, key: int) -> StepResult:
        """Run forward only."""
        return self.inner.eval_step(window, carried, key)

    def squared_grad_norm(self) -> float:
        """Return this rank's part of the squared norm: all replicas have the same gradient."""
        return self.inner.squared_grad_norm() / self.mesh.num_replicas

    def all_reduce(self, values: list[float]) -> list[float]:
        """Return the sums over all ranks."""
        return self.inner.all_reduce(values)

    def gather(self, values: list[float]) -> list[list[float]] | None:
        """Return the values of all ranks, on the first."""
        return self.mesh.world.gather(values)

    def _prepare_reducer(self) -> Tensor | None:
        if self._reducer is None:
            return None
        self._reducer.reducer.prepare_for_backward([])
        # Last blocks first, as their gradients are ready first.
        parameters = [parameter for parameter in self.stack.parameters() if parameter.requires_grad][::-1]
        ready_signal: Tensor = _ReadyWithoutGradient.apply(*parameters)  # type: ignore[no-untyped-call]
        return ready_signal

    def _settle_buckets(self) -> None:
        """Pass an empty backward, after which the reducer settles which weights share a bucket.

        It would do so after the first step of a run, and of a resumed run again: with three replicas or more, the
        order in which a bucket's sums are taken depends on it, and so do the last bits of the steps around it.
        """
        ready_signal = self._prepare_reducer()
        assert ready_signal is not None and self._reducer is not None
        ready_signal.backward()  # type: ignore[no-untyped-call]
        self.mesh.world.wait_timer.end_all_reduce()
        self._reducer.reducer._rebuild_buckets()
        self.stack.zero_grad(set_to_none=True)


class _ReadyWithoutGradient(torch.autograd.Function):
    """A zero that depends on all parameters and gives none of them a gradient.

    The reducer waits for every parameter to pass through the armed backward; one that this backward has no use for
    would keep its bucket waiting for ever, unreduced.
    """

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:  # noqa: ANN401
        ctx.num_parameters = len(parameters)
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:  # noqa: ANN401
        return (None,) * int(ctx.num_parameters)
