"""LSTM and GRU layers with resets on a CPU: one loop over time, whatever the number of resets.

Inputs and biases are multiplied with their weights for all time steps at once. The loop does what is left: the
recurrent product and the gates. A state is zeroed before the first time step of an episode. The gradient of the
recurrent weights is one product over all time steps, not a sum of one product per time step.

torch's layers have no resets: they would run in the pieces between them (`benchmarks/resets.py` compares both).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Keep = Sequence[Tensor | None]  # by time step: what the state before it is multiplied by, [batch, 1]; None for 1


def lstm_scan(gates: Tensor, h: Tensor, c: Tensor, keep: Keep, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs of an LSTM layer `[time, batch, features]` and its last `c`.

    `gates` are the inputs times their weights, plus biases, `[time, batch, 4 * features]`.
    """
    y, last_c = _LstmScan.apply(gates, h, c, keep, weight)  # type: ignore[no-untyped-call]
    return y, last_c


def gru_scan(gates: Tensor, h: Tensor, keep: Keep, weight: Tensor, bias: Tensor) -> Tensor:
    """Return the outputs of a GRU layer `[time, batch, features]`; `bias` is that of the recurrent weights."""
    y: Tensor = _GruScan.apply(gates, h, keep, weight, bias)  # type: ignore[no-untyped-call]
    return y


def _begin(state: Tensor, keep: Tensor | None, out: Tensor) -> Tensor:
    """Write the state before a time step, zero for rows that start again, to `out`; return it."""
    return out.copy_(state) if keep is None else torch.mul(state, keep, out=out)


class _LstmScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        gates, h, c, keep, weight = arguments
        gates, c = gates.clone(), c.clone()
        y, hs, cs = (h.new_empty(len(gates), *h.shape) for _ in range(3))  # hs and cs: before each time step
        for step in range(len(gates)):
            gates[step].addmm_(_begin(h, keep[step], hs[step]), weight.t())
            i, f, g, o = gates[step].chunk(4, dim=1)
            i.sigmoid_(), f.sigmoid_(), g.tanh_(), o.sigmoid_()
            torch.mul(f, _begin(c, keep[step], cs[step]), out=c).addcmul_(i, g)
            h = torch.tanh(c, out=y[step]).mul_(o)
        ctx.save_for_backward(gates, hs, cs, weight)
        ctx.keep = keep
        return y, c

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        gates, hs, cs, weight = ctx.saved_tensors
        dgates = torch.empty_like(gates)
        dy, dc = gradients
        dh, dc = torch.zeros_like(hs[0]), dc.clone()
        for step in reversed(range(len(gates))):
            dh += dy[step]
            i, f, g, o = gates[step].chunk(4, dim=1)
            di, df, dg, do = dgates[step].chunk(4, dim=1)
            tanh_c = (f * cs[step]).addcmul_(i, g).tanh_()
            torch.mul(dh, tanh_c, out=do).mul_(o).mul_(1 - o)
            dc.addcmul_(dh * o, 1 - tanh_c * tanh_c)
            torch.mul(dc, g, out=di).mul_(i).mul_(1 - i)
            torch.mul(dc, i, out=dg).mul_(1 - g * g)
            torch.mul(dc, cs[step], out=df).mul_(f).mul_(1 - f)
            dc.mul_(f)
            dh = dgates[step] @ weight
            if (keep := ctx.keep[step]) is not None:
                dh.mul_(keep), dc.mul_(keep)
        return dgates, dh, dc, None, dgates.flatten(0, 1).t() @ hs.flatten(0, 1)


class _GruScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:  # noqa: ANN401
        gates, h, keep, weight, bias = arguments
        gates = gates.clone()
        y: Tensor
        y, hs, recurrent_n = (h.new_empty(len(gates), *h.shape) for _ in range(3))  # recurrent_n: what r multiplies
        for step in range(len(gates)):
            r_z, n = gates[step].split([2 * h.shape[1], h.shape[1]], dim=1)
            recurrent = torch.addmm(bias, _begin(h, keep[step], hs[step]), weight.t())
            r_z.add_(recurrent[:, : r_z.shape[1]]).sigmoid_()
            recurrent_n[step] = recurrent[:, r_z.shape[1] :]
            r, z = r_z.chunk(2, dim=1)
            n.addcmul_(r, recurrent_n[step]).tanh_()
            h = torch.lerp(n, hs[step], z, out=y[step])
        ctx.save_for_backward(gates, hs, recurrent_n, weight)
        ctx.keep = keep
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        gates, hs, recurrent_n, weight = ctx.saved_tensors
        (dy,) = gradients
        dgates, drecurrent = torch.empty_like(gates), torch.empty_like(gates)
        dh = torch.zeros_like(hs[0])
        for step in reversed(range(len(gates))):
            dh += dy[step]
            r, z, n = gates[step].chunk(3, dim=1)
            dr, dz, dn = dgates[step].chunk(3, dim=1)
            torch.mul(dh, hs[step] - n, out=dz).mul_(z).mul_(1 - z)
            torch.mul(dh, 1 - z, out=dn).mul_(1 - n * n)
            torch.mul(dn, recurrent_n[step], out=dr).mul_(r).mul_(1 - r)
            drecurrent[step] = dgates[step]
            drecurrent[step].chunk(3, dim=1)[2].mul_(r)
            dh = torch.addmm(dh * z, drecurrent[step], weight)
            if (keep := ctx.keep[step]) is not None:
                dh.mul_(keep)
        flat = drecurrent.flatten(0, 1)
        return dgates, dh, None, flat.t() @ hs.flatten(0, 1), flat.sum(0)
