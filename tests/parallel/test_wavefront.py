"""The wavefront's schedule, as a picture."""

from typing import Any

import torch
from torch import Tensor

from stretto.parallel.rows import Packing
from stretto.parallel.wavefront import run_wavefront


class Recorder:
    """Messages of one stage that only count slots; what would be received is zeros."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.slot = 0

    def shift(self, token: Tensor, sends: Any, takes: Any) -> tuple[Tensor, list[Tensor]]:  # noqa: ANN401
        self.slot += 1
        return token, [torch.zeros(shape) for _, shape in takes]


def test_the_schedule_is_a_parallelogram() -> None:
    chunks = Packing([torch.full((2,), 8)]).chunks(4)
    lines = []
    for rank in range(3):
        messages, line = Recorder(rank, 3), [" "] * 6

        def stage(steps: Tensor, chunk: Any, state: Any) -> Any:  # noqa: ANN401
            line[messages.slot] = str(chunks.index(chunk))  # noqa: B023
            return steps, state

        steps = torch.zeros(16, 1) if rank == 0 else None
        run_wavefront(stage, steps, (), chunks, messages, torch.zeros(()), (1,))  # type: ignore[arg-type]
        lines.append("".join(line))
    assert lines == ["0123  ", " 0123 ", "  0123"]
