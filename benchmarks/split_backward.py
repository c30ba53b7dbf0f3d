"""Would weight gradients at the end of the step pay? A backward in two parts, compared with torch's LSTM.

    python benchmarks/split_backward.py [--quick]

Nobody needs the weight gradients of a chunk before the end of the step, so a stage could compute them while it waits
for others, in one product over the whole window. torch's LSTM (oneDNN) computes them with the other gradients, so the
two parts need a loop over time of our own. This times both, and computes the step of two equal stages from it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from timing import parse_quick, show, take_turns

HIDDEN = 512


@dataclass
class Forward:
    """What the backward of a chunk needs: by time step, the inputs, states before it, and activated gates."""

    x: Tensor
    h: Tensor
    c: Tensor
    gates: Tensor
    y: Tensor


@torch.no_grad()
def run_forward(lstm: nn.LSTM, x: Tensor) -> Forward:
    num_steps, rows, _ = x.shape
    weight_ih, weight_hh, *biases = lstm.parameters()
    gates = torch.addmm(biases[0] + biases[1], x.flatten(0, 1), weight_ih.t())
    gates = gates.view(num_steps, rows, 4 * HIDDEN)
    h, c = x.new_zeros(2, num_steps + 1, rows, HIDDEN)
    for t in range(num_steps):
        now = gates[t].addmm_(h[t], weight_hh.t())
        now[:, : 2 * HIDDEN].sigmoid_()
        now[:, 2 * HIDDEN : 3 * HIDDEN].tanh_()
        now[:, 3 * HIDDEN :].sigmoid_()
        i, f, g, o = now.chunk(4, 1)
        torch.addcmul(i * g, f, c[t], out=c[t + 1])
        torch.mul(o, c[t + 1].tanh(), out=h[t + 1])
    return Forward(x, h[:-1], c, gates, h[1:])


@torch.no_grad()
def run_backward(lstm: nn.LSTM, saved: Forward, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of the inputs and of the gates before their activation."""
    weight_ih, weight_hh, *_ = lstm.parameters()
    factors = _gate_factors(saved)
    dgates = torch.empty_like(saved.gates)
    tanh_c = saved.c[1:].tanh()
    dc_of_dh = saved.gates[..., 3 * HIDDEN :] * (1 - tanh_c * tanh_c)
    dh, dc = torch.zeros_like(dy[0]), torch.zeros_like(dy[0])
    for t in range(len(dy) - 1, -1, -1):
        dh = dh + dy[t]
        dc = torch.addcmul(dc, dh, dc_of_dh[t])
        now = dgates[t].view(-1, 4, HIDDEN)
        torch.mul(factors[t].view(-1, 4, HIDDEN)[:, :3], dc.unsqueeze(1), out=now[:, :3])
        torch.mul(factors[t][:, 3 * HIDDEN :], dh, out=now[:, 3])
        dh, dc = dgates[t] @ weight_hh, dc * saved.gates[t][:, HIDDEN : 2 * HIDDEN]
    return dgates.flatten(0, 1) @ weight_ih, dgates


def _gate_factors(saved: Forward) -> Tensor:
    """Return what dc (of i, f and g) or dh (of o) is multiplied by, for each gate."""
    i, f, g, o = saved.gates.chunk(4, 2)
    tanh_c = saved.c[1:].tanh()
    return torch.cat((g * i * (1 - i), saved.c[:-1] * f * (1 - f), i * (1 - g * g), tanh_c * o * (1 - o)), 2)


def run_weights(saved: Forward, dgates: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    flat = dgates.flatten(0, 1).t()
    return flat @ saved.x.flatten(0, 1), flat @ saved.h.flatten(0, 1), flat.sum(1)


def largest_difference(lstm: nn.LSTM, x: Tensor, dy: Tensor) -> float:
    """Return how much the gradients of both ways differ, relative to the largest."""
    x = x.clone().requires_grad_()
    lstm(x)[0].backward(dy)
    saved = run_forward(lstm, x.detach())
    dx, dgates = run_backward(lstm, saved, dy)
    differences = []
    for gradient, leaf in zip((dx, *run_weights(saved, dgates)), (x, *lstm.parameters()), strict=False):
        assert leaf.grad is not None
        differences.append(float((gradient.view_as(leaf) - leaf.grad).abs().max() / leaf.grad.abs().max()))
    lstm.zero_grad()
    return max(differences)


def measure(rows: int, window: int, chunks: int, rounds: int) -> dict[str, float]:
    """Return the seconds of a chunk's forward and backward in both ways, and of the window's weight gradients."""
    torch.manual_seed(0)
    lstm = nn.LSTM(HIDDEN, HIDDEN)
    x, dy = torch.randn(2, window // chunks, rows, HIDDEN)
    assert largest_difference(lstm, x, dy) < 1e-4
    whole = torch.randn(window, rows, HIDDEN)
    saved, saved_whole = run_forward(lstm, x), run_forward(lstm, whole)
    dgates = torch.randn_like(saved_whole.gates)
    x.requires_grad_()  # torch's backward then also computes the gradient that a stage sends
    y = lstm(x)[0]
    # Gradients are added to .grad, as in every chunk but the first.
    sides: dict[str, Callable[[], object]] = {
        "forward": partial(lstm, x),
        "backward": partial(y.backward, dy, retain_graph=True),
        "own forward": partial(run_forward, lstm, x.detach()),
        "own backward": partial(run_backward, lstm, saved, dy),
        "weights": partial(run_weights, saved_whole, dgates),
    }
    return take_turns(f"{rows} x {window}, {chunks} chunks", sides, rounds)


def main() -> None:
    quick = parse_quick("A backward in two parts compared with torch's LSTM.")
    rows, figures = [], {}
    for num_rows, window in ((32, 256), (8, 512)):
        fused, split = {}, {}
        for chunks in (4, 8, 16):
            times = measure(num_rows, window, chunks, 4 if quick else 20)
            # Two equal stages: each works on all chunks, and waits for the other's first forward and last backward.
            fused[chunks] = (chunks + 1) * (times["forward"] + times["backward"])
            split[chunks] = (chunks + 1) * (times["own forward"] + times["own backward"]) + times["weights"]
            cells = [f"{1e3 * seconds:.1f}" for seconds in times.values()]
            rows.append([f"{num_rows} x {window}", str(chunks), *cells, f"{fused[chunks] / split[chunks]:.3f}"])
        figures[f"split_over_fused_{num_rows}x{window}"] = min(fused.values()) / min(split.values())
    show(
        f"A chunk of one LSTM layer in milliseconds, H={HIDDEN}, fp32, one thread",
        ["rows x steps", "chunks", "forward", "backward", "own forward", "own backward", "weights", "gain"],
        rows,
        figures,
    )


if __name__ == "__main__":
    main()
