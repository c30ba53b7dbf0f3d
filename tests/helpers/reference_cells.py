"""LSTM and GRU step by step in plain tensor operations: the reference for the blocks."""

import torch
from torch import Tensor

Weights = dict[str, Tensor]


def lstm(x: Tensor, h: Tensor, c: Tensor, weights: Weights, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """One LSTM layer: x [time, batch, in], h [batch, out], c [batch, hidden]."""
    outputs = []
    for x_t in x:
        gates = x_t @ weights[f"weight_ih_l{layer}"].T + h @ weights[f"weight_hh_l{layer}"].T
        gates = gates + weights[f"bias_ih_l{layer}"] + weights[f"bias_hh_l{layer}"]
        i, f, g, o = gates.chunk(4, dim=1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        if f"weight_hr_l{layer}" in weights:
            h = h @ weights[f"weight_hr_l{layer}"].T
        outputs.append(h)
    return torch.stack(outputs), h, c


def gru(x: Tensor, h: Tensor, weights: Weights, layer: int) -> tuple[Tensor, Tensor]:
    """One GRU layer: x [time, batch, in], h [batch, hidden]."""
    outputs = []
    for x_t in x:
        from_x = x_t @ weights[f"weight_ih_l{layer}"].T + weights[f"bias_ih_l{layer}"]
        from_h = h @ weights[f"weight_hh_l{layer}"].T + weights[f"bias_hh_l{layer}"]
        x_r, x_z, x_n = from_x.chunk(3, dim=1)
        h_r, h_z, h_n = from_h.chunk(3, dim=1)
        r, z = torch.sigmoid(x_r + h_r), torch.sigmoid(x_z + h_z)
        h = (1 - z) * torch.tanh(x_n + r * h_n) + z * h
        outputs.append(h)
    return torch.stack(outputs), h
