"""VocabHead: the softmax head of a model whose table is split over the stages of a replica.

For each chunk, in the two actions H and G of `stretto.plan.head_schedule`:

                 stage 0             stage 1 (the last)
    H    hidden  ◄────── broadcast ── hidden             the output of the last block before the head
         logits of rows 0..V/2        logits of rows V/2..V
         max, sum ◄── all-gather ──►  max, sum           of each target's logits on this stage
    G    loss and gradient of the logits, from the maxima and sums of all stages
         gradient of the table's rows, summed            gradient of the table's rows, summed
         d(hidden) ──── reduce ─────► d(hidden)          the backward of the chunk starts from it

The logits live from H to G only. The loss is per time step, so a chunk's G need not wait for later chunks.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.base.errors import ConfigError, DataError
from stretto.base.window import Window
from stretto.blocks.losses import CrossEntropy, LossSum, full_precision
from stretto.blocks.torch_losses import mark_ignored
from stretto.blocks.vocab_embedding import EmbeddingShard
from stretto.blocks.vocab_shard import Softmax, VocabShard, find_valid, shard_rows
from stretto.engine.cut import WindowCut
from stretto.engine.embedding_step import EmbeddingStep
from stretto.engine.engine import OnOutputs
from stretto.engine.precision import Precision, compute_dtype
from stretto.mesh.mesh import Mesh
from stretto.mesh.stage_group import StageGroup, Work
from stretto.plan.actions import Action, ActionKind
from stretto.plan.head_schedule import head_rounds, receives_before

_EXCHANGE = "the exchange of logits"


class VocabHead:
    """This stage's rows of the table, and the group of all stages of the replica.

    `embedding` has the same rows, if the table is that of the embedding too.
    """

    def __init__(
        self,
        shard: VocabShard,
        loss: CrossEntropy,
        mesh: Mesh,
        group: StageGroup,
        precision: Precision,
        embedding: EmbeddingShard | None = None,
    ) -> None:
        self.shard = shard
        self.embedding = embedding
        self.loss = loss
        self.mesh = mesh
        self.group = group
        self.dtype = compute_dtype(precision) or shard.weight.dtype

    def check_window(self, window: Window) -> None:
        """Raise unless a window's targets, and the tokens of a split embedding, are ids of the table's rows.

        All stages check the same ones.
        """
        targets = window.targets
        if targets is None:
            raise DataError("the window has no targets, which every stage needs; read it with targets=True")
        if targets.is_floating_point() or targets.ndim != 2:
            kind = "floats" if targets.is_floating_point() else "integers"
            raise ConfigError(
                f"layout.vocab_parallel=true takes integer targets [time, batch], not {kind} {list(targets.shape)}; "
                "leave it out"
            )
        if targets.device.type == "cpu" and targets.numel():
            valid = targets[find_valid(targets, self.loss)]
            num_tokens = self.shard.num_table_rows
            if valid.numel() and not (int(valid.min()) >= 0 and int(valid.max()) < num_tokens):
                raise DataError(
                    f"targets are between {int(valid.min())} and {int(valid.max())}, but the output layer has "
                    f"{num_tokens} outputs; give it one per token"
                )
        if self.embedding is not None and window.inputs is not None and window.inputs.device.type == "cpu":
            check_tokens(window.inputs, self.embedding.num_table_rows)


def check_tokens(tokens: Tensor, num_tokens: int) -> None:
    """Raise unless a window's inputs are ids of the rows of an embedding."""
    if tokens.is_floating_point() or tokens.ndim != 2:
        kind = "floats" if tokens.is_floating_point() else "integers"
        raise ConfigError(f"the embedding takes tokens [time, batch], not {kind} {list(tokens.shape)}; use integers")
    if tokens.numel() and not (int(tokens.min()) >= 0 and int(tokens.max()) < num_tokens):
        raise DataError(
            f"tokens are between {int(tokens.min())} and {int(tokens.max())}, but the embedding has {num_tokens} rows; "
            "give it one per token"
        )


class HeadStep:
    """The head's part of one step, training or evaluation; `targets` are those of the sorted window.

    `embedding` is the part of an embedding that uses the same table.
    """

    def __init__(
        self, head: VocabHead, cut: WindowCut, targets: Tensor, embedding: EmbeddingStep | None = None
    ) -> None:
        self.head = head
        self.embedding = embedding
        self.has_backward = torch.is_grad_enabled()
        self.cut = cut
        self.targets = targets
        self.loss_scale = 1.0
        self.on_outputs: OnOutputs | None = None
        chunk_counts = [len(shape.chunk_bounds) for shape in cut.micro_batches]
        mesh = head.mesh
        self._rounds = head_rounds(
            mesh.stage,
            mesh.num_stages,
            chunk_counts,
            has_backward=self.has_backward,
            is_tied=embedding is not None,
        )
        self._receives = receives_before(self._rounds)
        # Cast once per step; a view of the weights if they have the dtype already.
        self._weight = head.shard.weight.detach().to(head.dtype)
        self._bias = None if head.shard.bias is None else head.shard.bias.detach().to(head.dtype)
        self._outputs: dict[tuple[int, int], Tensor] = {}  # of the last stage, by (micro-batch, chunk)
        self._gradients: dict[tuple[int, int], tuple[Tensor, Work]] = {}  # of hidden states, until all are summed
        # Between H and G of a chunk:
        self._hidden: Tensor | None = None
        self._live: tuple[Tensor, Tensor, Tensor] | None = None  # exponentials, statistics, those of all stages
        self._pending: list[Work] = []  # what G waits for

    def schedule(self) -> list[Action]:
        """Return this stage's actions, in order: forwards, heads, lookups and, in training, backwards."""
        return [action for round_ in self._rounds for action in round_]

    def keep_output(self, action: Action, y: Tensor) -> None:
        """Keep the last stage's output of a chunk until the head runs on it."""
        self._outputs[action.micro_batch, action.chunk] = y.detach()

    def receive(self, action: Action) -> None:
        """Wait for what an action of all stages needs of the others, such as the hidden states for H."""
        group, mesh = self.head.group, self.head.mesh
        if action.kind is ActionKind.HEAD_GRADIENT:
            for work in self._pending:
                group.wait(work, _EXCHANGE)
            self._pending.clear()
            return
        if action.kind is not ActionKind.HEAD:
            assert self.embedding is not None
            self.embedding.receive(action)
            return
        if mesh.is_last_stage:
            self._hidden = self._outputs.pop((action.micro_batch, action.chunk)).to(self.head.dtype).contiguous()
        else:
            shape = (*self.cut.dims(action), self._weight.shape[1])
            self._hidden = torch.empty(shape, dtype=self.head.dtype, device=self._weight.device)
        work = group.start_broadcast(self._hidden, mesh.num_stages - 1)
        if mesh.is_last_stage:
            self._pending.append(work)  # it computes while the others receive
        else:
            group.wait(work, _EXCHANGE)

    @torch.no_grad()
    def run(self, action: Action) -> list[LossSum]:
        """Run an action of all stages, after `receive`; the last stage's G returns the chunk's loss."""
        if self.embedding is not None and action.kind in (ActionKind.EMBEDDING, ActionKind.EMBEDDING_GRADIENT):
            self.embedding.run(action)
            return []
        labels = self.cut.part(self.targets, action)
        if action.kind is ActionKind.HEAD:
            self._run_logits(labels)
            return []
        loss = self._run_gradient(action, labels.reshape(-1))
        return [loss] if self.head.mesh.is_last_stage else []

    def take_gradient(self, action: Action) -> Tensor:
        """Wait for the gradient of the last stage's output of a chunk, and return it."""
        gradient, work = self._gradients.pop((action.micro_batch, action.chunk))
        self.head.group.wait(work, _EXCHANGE)
        return gradient

    def finish(self) -> None:
        """Wait until all gradients have been sent."""
        self._free_gradients(num_kept=0)
        if self.embedding is not None:
            self.embedding.finish()

    def post_receives(self, action: Action) -> None:
        """Post the receives that must be pending before an action, though later ones need their messages."""
        mesh, kinds = self.head.mesh, self._receives.get(action, set())
        if ActionKind.FORWARD in kinds and mesh.forward_channel is not None:
            mesh.forward_channel.post_ahead()
        if ActionKind.BACKWARD in kinds and mesh.backward_channel is not None:
            mesh.backward_channel.post_ahead()

    def _run_logits(self, labels: Tensor) -> None:
        assert self._hidden is not None
        logits = F.linear(self._hidden.flatten(0, 1), self._weight, self._bias)
        if self.on_outputs is not None:
            self._show_outputs(logits, labels, self.on_outputs)
        exponentials = full_precision(logits)
        own = self.head.shard.statistics(exponentials, labels.reshape(-1))
        gathered, work = self.head.group.start_all_gather(own)
        self._pending.append(work)
        self._live = exponentials, own, gathered

    def _run_gradient(self, action: Action, labels: Tensor) -> LossSum:
        head = self.head
        assert self._live is not None and self._hidden is not None
        (exponentials, own, gathered), hidden = self._live, self._hidden.flatten(0, 1)
        self._live = self._hidden = None
        softmax = Softmax.combine(gathered)
        is_valid = find_valid(labels, head.loss)
        if self.has_backward:
            scale = (is_valid * self.loss_scale).to(own.dtype)
            factors = (own[0] - softmax.log_sum).exp()
            gradient = head.shard.loss_gradient(exponentials, labels, factors, scale).to(head.dtype)
            # The gradient of the hidden states first: it travels while that of the table is computed.
            hidden_gradient = (gradient @ self._weight).view(*self.cut.dims(action), -1)
            summing = head.group.start_reduce(hidden_gradient, head.mesh.num_stages - 1)
            self._gradients[action.micro_batch, action.chunk] = hidden_gradient, summing
            head.shard.add_gradients(gradient, hidden)
            if not head.mesh.is_last_stage:
                self._free_gradients(num_kept=1)
        return softmax.loss(is_valid, counts_correct=not self.has_backward)

    def _free_gradients(self, num_kept: int) -> None:
        """Wait until older gradients have been sent: this frees them during the step, not only at its end."""
        for key in list(self._gradients)[: len(self._gradients) - num_kept]:
            _, work = self._gradients.pop(key)
            self.head.group.wait(work, _EXCHANGE)

    def _show_outputs(self, logits: Tensor, labels: Tensor, on_outputs: OnOutputs) -> None:
        """Gather the logits of all stages, which metrics need, and show them on the last stage."""
        head, mesh = self.head, self.head.mesh
        ranges = [shard_rows(head.shard.num_table_rows, stage, mesh.num_stages) for stage in range(mesh.num_stages)]
        padded = F.pad(logits, (0, max(map(len, ranges)) - logits.shape[1]))
        gathered, work = head.group.start_all_gather(padded)
        head.group.wait(work, _EXCHANGE)
        if mesh.is_last_stage:
            y = torch.cat([part[:, : len(rows)] for part, rows in zip(gathered, ranges, strict=True)], dim=1)
            on_outputs(y.view(*labels.shape, -1), mark_ignored(head.loss, labels))
