"""The loop people write by hand: plain PyTorch, one device, truncated BPTT. Trainer must equal it."""

import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ReferenceModel(nn.Module):
    """Embedding, LSTM layers, softmax head."""

    def __init__(self, num_tokens: int, hidden: int, num_layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_tokens, hidden)
        self.lstm = nn.LSTM(hidden, hidden, num_layers)
        self.head = nn.Linear(hidden, num_tokens)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        y, state = self.lstm(self.embedding(x), state)
        return self.head(y), state

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Copy the weights of a Stack of one embedding, one LSTM a layer, one linear."""
        last = 1 + self.lstm.num_layers
        named = {"embedding.weight": weights["blocks.0.module.weight"]}
        for layer in range(self.lstm.num_layers):
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
                named[f"lstm.{name}_l{layer}"] = weights[f"blocks.{1 + layer}.cell.{name}_l0"]
        named["head.weight"], named["head.bias"] = (weights[f"blocks.{last}.module.{n}"] for n in ("weight", "bias"))
        self.load_state_dict(named)


@dataclass(frozen=True)
class ReferenceReport:
    loss: float
    tokens_per_second: float


def train(
    model: ReferenceModel, windows: Iterable[tuple[Tensor, Tensor]], lr: float, clip: float
) -> Iterable[ReferenceReport]:
    optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=0.0, fused=True)
    state: tuple[Tensor, Tensor] | None = None
    started = time.perf_counter()
    for inputs, targets in windows:
        optimizer.zero_grad()
        logits, state = model(inputs, state)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        state = (state[0].detach(), state[1].detach())
        value = loss.item()
        now = time.perf_counter()
        yield ReferenceReport(value, targets.numel() / (now - started))
        started = time.perf_counter()
