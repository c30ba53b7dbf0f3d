"""Where the time of a region goes: two gloo ranks, two stages of two LSTM layers of 512, forward and backward.

    python benchmarks/region_parts.py [--quick]

`kernels` is what each rank computes, run bare: torch's LSTM over its two layers and the rows of both ranks, chunk by
chunk, without messages. With the bubble, in which a stage waits for the first or the last chunk, that is the least that
a region can take; `region_over_bare` is how much more it takes, with the best number of chunks. The other parts are
timed by themselves; in a region some of them pass while the other rank computes, so they may add up to more.

All sides run alternately on the same ranks. A side is as slow as its slowest rank. Figures are medians over the rounds.
"""

import random
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paused_pools import PausedPools
from stretto import World, parallelize
from stretto.parallel import Layout
from stretto.parallel.groups import stage_group
from stretto.parallel.guard import Call
from stretto.parallel.layers import enter
from stretto.parallel.rnn import RnnLayers
from timing import parse_quick, show

Side = Callable[[], object]
HIDDEN, LAYERS, STAGES = 512, 4, 2
SHAPES = [(32, 256), (8, 512), (2, 512)]  # rows of both ranks, steps
PARTS = ["guard", "weights", "rows to stages", "between stages", "stages to rows"]


def kernels(rows: int, window: int, chunks: int) -> Side:
    """Return two layers over all rows in chunks, as one stage runs them."""
    rnn = nn.LSTM(HIDDEN, HIDDEN, LAYERS // STAGES)
    x, gradient = torch.randn(window, rows, HIDDEN, requires_grad=True), torch.randn(window, rows, HIDDEN)
    weights = [[getattr(rnn, name) for name in names] for names in rnn._all_weights]

    def side() -> None:
        rnn.zero_grad()
        states = [[torch.zeros(1, rows, HIDDEN)] * 2 for _ in weights]
        outputs = []
        for chunk in torch.tensor_split(x, chunks):
            for layer, own in enumerate(weights):
                chunk, *states[layer] = torch.lstm(chunk, states[layer], own, True, 1, 0.0, True, False, False)
            outputs.append(chunk)
        torch.autograd.backward(torch.cat(outputs), gradient)

    return side


def region(rows: int, window: int, chunks: int) -> Side:
    rnn = parallelize(nn.LSTM(HIDDEN, HIDDEN, LAYERS), Layout(STAGES, chunks))
    x = torch.randn(window, rows // STAGES, HIDDEN, requires_grad=True)
    gradient = torch.randn(window, rows // STAGES, HIDDEN)

    def side() -> None:
        rnn.zero_grad()
        torch.autograd.backward(rnn(x)[0], gradient)

    return side


def parts(world: World, rows: int, window: int, chunks: int) -> dict[str, Side]:
    """Return what a region does besides, each part forward and backward."""
    group = stage_group("stages", STAGES)
    messages, rank = group.messages(STAGES), world.rank
    own = torch.randn(window, rows // STAGES, HIDDEN, requires_grad=True)
    chunk = torch.randn(window * rows // chunks, HIDDEN, requires_grad=True)
    rnn = nn.LSTM(HIDDEN, HIDDEN, LAYERS)

    def swap(give: list[list[Tensor]], take: list[list[torch.Size]]) -> None:
        token, received = messages.swap(own.new_zeros((), requires_grad=True), give, take)
        tensors = [token, *(part for each in received for part in each)]
        torch.autograd.backward(tensors, [each.detach() for each in tensors])

    def rows_to_stages() -> None:  # to the first one
        swap([[own], []], [[own.shape] * (rank == 0)] * STAGES)

    def stages_to_rows() -> None:  # from the last one
        swap([[own] * (rank == 1)] * STAGES, [[], [own.shape]])

    def shift() -> None:
        token = own.new_zeros((), requires_grad=True)
        received: list[Tensor] = []
        for _ in range(chunks):
            token, new = messages.shift(token, [(1, chunk)] * (rank == 0), [(0, chunk.shape)] * (rank == 1))
            received += new
        torch.autograd.backward([token, *received], [torch.zeros(()), *(chunk.detach() for _ in received)])

    def weights() -> None:
        rnn.zero_grad()
        layers = range(rank * LAYERS // STAGES, (rank + 1) * LAYERS // STAGES)
        token, entered = enter(RnnLayers(rnn), own.new_zeros((), requires_grad=True), layers, torch.float32)
        tensors = [token, *(weight for layer in entered for weight in layer)]
        torch.autograd.backward(tensors, [each.detach() for each in tensors])

    def compare() -> None:
        for is_backward in (False, True):
            group.guard.compare(Call(0, 0, is_backward, 0, 0))

    sides: list[Side] = [compare, weights, rows_to_stages, shift, stages_to_rows]
    return dict(zip(PARTS, sides, strict=True))


def measure(world: World, rows: int, window: int, all_chunks: list[int], rounds: int) -> dict[str, list[float]]:
    torch.set_flush_denormal(True)
    torch.manual_seed(0)
    sides = {f"region {chunks}": region(rows, window, chunks) for chunks in all_chunks}
    sides |= {f"kernels {chunks}": kernels(rows, window, chunks) for chunks in all_chunks}
    sides |= {
        f"{name} {chunks}": side for chunks in all_chunks for name, side in parts(world, rows, window, chunks).items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    shuffled = random.Random(0)
    for index in range(rounds + 1):
        for name in shuffled.sample([*sides], len(sides)):
            dist.barrier()
            started = time.perf_counter()
            sides[name]()
            dist.barrier()
            seconds[name] += [time.perf_counter() - started] * (index > 0)
    return seconds


def main() -> None:
    quick = parse_quick("Where the time of a region goes.")
    pools, rows = PausedPools(), []
    figures: dict[str, float] = {}
    for shape in SHAPES[2:] if quick else SHAPES:
        all_chunks = [8] if quick else [8, 12, 16]
        by_rank = pools.run(shape, 2, measure, *shape, all_chunks, 3 if quick else 11, seconds=3600)
        pools.start(shape, 2).close()
        middle = {name: median(map(max, *(found[name] for found in by_rank))) for name in by_rank[0]}
        chunks = min(all_chunks, key=lambda count: middle[f"region {count}"])
        bare, whole = middle[f"kernels {chunks}"], middle[f"region {chunks}"]
        table = {"kernels": bare, "bubble": bare * (STAGES - 1) / chunks}
        least = sum(table.values())
        table |= {name: middle[f"{name} {chunks}"] for name in PARTS} | {"region": whole}
        name = f"{shape[0]}x{shape[1]}"
        figures |= {f"region_over_bare_{name}": whole / least, f"chunks_{name}": chunks}
        figures |= {f"kernels_ms_{name}_{count}": 1e3 * middle[f"kernels {count}"] for count in all_chunks}
        rows += [
            [name, str(chunks), part, f"{1e3 * value:.1f}", f"{value / whole:.3f}"] for part, value in table.items()
        ]
    figures["region_over_bare"] = figures[f"region_over_bare_{name}" if quick else "region_over_bare_32x256"]
    pools.close()
    columns = ["rows x steps", "chunks", "part", "milliseconds", "of the region"]
    show("4 LSTM layers of 512 in two stages on two gloo ranks, fp32", columns, rows, figures)


if __name__ == "__main__":
    main()
