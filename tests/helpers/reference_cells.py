"""Recurrent cells step by step in plain tensor operations: the reference for the blocks."""

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


def min_gru(x: Tensor, h: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
    """A minimal GRU: x [time, batch, in], h [batch, hidden]."""
    outputs = []
    for x_t in x:
        z, candidate = (x_t @ weights["inputs.weight"].T + weights["inputs.bias"]).chunk(2, dim=1)
        h = (1 - torch.sigmoid(z)) * h + torch.sigmoid(z) * candidate
        outputs.append(h)
    return torch.stack(outputs), h


def min_lstm(x: Tensor, h: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
    """A minimal LSTM: x [time, batch, in], h [batch, hidden]."""
    outputs = []
    for x_t in x:
        f, i, candidate = (x_t @ weights["inputs.weight"].T + weights["inputs.bias"]).chunk(3, dim=1)
        f, i = torch.sigmoid(f), torch.sigmoid(i)
        h = f / (f + i) * h + i / (f + i) * candidate
        outputs.append(h)
    return torch.stack(outputs), h


def mlstm(x: Tensor, c: Tensor, n: Tensor, weights: Weights) -> tuple[Tensor, Tensor, Tensor]:
    """An mLSTM without a stabilizer: c [batch, heads, features, features], n [batch, heads, features]."""
    batch, heads, features = n.shape
    outputs = []
    for x_t in x:
        parts = (x_t @ weights["inputs.weight"].T + weights["inputs.bias"]).chunk(4, dim=1)
        q, k, v, o = (part.view(batch, heads, features) for part in parts)
        i, f = (x_t @ weights["gates.weight"].T + weights["gates.bias"]).chunk(2, dim=1)
        i, f, k = torch.exp(i), torch.sigmoid(f), k / features**0.5
        c = f[:, :, None, None] * c + i[:, :, None, None] * torch.einsum("bhk,bhv->bhkv", k, v)
        n = f[:, :, None] * n + i[:, :, None] * k
        norm = torch.einsum("bhk,bhk->bh", q, n).abs().clamp(min=1.0)
        h = torch.sigmoid(o) * torch.einsum("bhk,bhkv->bhv", q, c) / norm[:, :, None]
        outputs.append(h.flatten(1))
    return torch.stack(outputs), c, n


def slstm(x: Tensor, h: Tensor, c: Tensor, n: Tensor, weights: Weights) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """An sLSTM without a stabilizer: h, c and n are [batch, hidden]."""
    heads, features, _ = weights["weight_hh"].shape
    outputs = []
    for x_t in x:
        from_x = (x_t @ weights["inputs.weight"].T + weights["inputs.bias"]).view(len(h), heads, 4, features)
        from_h = torch.einsum("bhk,hkg->bhg", h.view(len(h), heads, features), weights["weight_hh"]).view_as(from_x)
        i, f, z, o = (gate.flatten(1) for gate in (from_x + from_h).unbind(2))
        i, f = torch.exp(i), torch.sigmoid(f)
        c, n = f * c + i * torch.tanh(z), f * n + i
        h = torch.sigmoid(o) * c / n
        outputs.append(h)
    return torch.stack(outputs), h, c, n
