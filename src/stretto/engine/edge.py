"""Edge: where activations pass from one run of blocks to the next, and their gradients back."""

from collections.abc import Iterator

from torch import Tensor

from stretto.engine.boundary import BoundarySpec
from stretto.engine.cut import WindowCut
from stretto.engine.stage_run import StageRun
from stretto.mesh.channel import Channel
from stretto.plan.actions import Action, ActionKind


class Edge:
    """The edge between two runs in one step. If both are on this stage, tensors are kept here until they are taken.

    Chunks are handed over one by one. A run that looks ahead takes all chunks of a micro-batch, and joins them; its own
    outputs are cut into chunks. Rows that ended before a chunk are not part of it; joined, they have zeros there.

        run that works on chunks   y0  y1  y2  ──►  x = joined        run that looks ahead
                                  dy0 dy1 dy2  ◄──  dx, cut
    """

    def __init__(self, cut: WindowCut, forward: Channel | None = None, backward: Channel | None = None) -> None:
        self.cut = cut  # of the messages
        self._channels = {ActionKind.FORWARD: forward, ActionKind.BACKWARD: backward}
        self._kept: dict[tuple[ActionKind, int, int], Tensor] = {}

    def send(self, action: Action, tensor: Tensor, run: StageRun) -> None:
        """Hand over what an action of `run` has computed: its outputs, or the gradient of its inputs."""
        messages = list(self._messages(action, run))
        channel = self._channels[action.kind]
        for message in messages:
            part = tensor if len(messages) == 1 else self.cut.micro_batch_part(tensor, message)
            if channel is None:
                self._kept[message.kind, message.micro_batch, message.chunk] = part
            else:
                channel.send(part)

    def receive(self, action: Action, run: StageRun, description: str) -> Tensor:
        """Return what an action of `run` needs: its inputs, or the gradient of its outputs."""
        messages = list(self._messages(action, run))
        if len(messages) == 1:
            return self._take(messages[0], description)
        joined: Tensor | None = None
        for message in messages:
            part = self._take(message, description)
            if joined is None:
                joined = part.new_zeros(*self.cut.whole().dims(action), *part.shape[2:])
            self.cut.micro_batch_part(joined, message).copy_(part)
        assert joined is not None
        return joined

    def buffers(self, action: Action, run: StageRun, spec: BoundarySpec) -> Iterator[Tensor]:
        """Yield a buffer for each message that an action of `run` receives."""
        channel = self._channels[action.kind]
        if channel is not None:
            for message in self._messages(action, run):
                yield spec.empty(self.cut.dims(message), channel.device)

    def _messages(self, action: Action, run: StageRun) -> Iterator[Action]:
        if not run.is_whole:
            yield action
            return
        chunks = range(len(self.cut.micro_batches[action.micro_batch].chunk_bounds))
        for chunk in chunks if action.kind is ActionKind.FORWARD else reversed(chunks):
            yield Action(action.kind, action.micro_batch, chunk)

    def _take(self, message: Action, description: str) -> Tensor:
        channel = self._channels[message.kind]
        if channel is None:
            return self._kept.pop((message.kind, message.micro_batch, message.chunk))
        tensor = channel.receive(description)
        channel.prepare_receive()
        return tensor
