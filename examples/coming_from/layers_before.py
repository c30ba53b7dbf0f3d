"""An LSTM with a layer on each GPU, by hand.

python layers_before.py    # reads series.npz
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_GPUS = torch.cuda.device_count()
DEVICES = [torch.device("cuda", layer % NUM_GPUS) if NUM_GPUS else torch.device("cpu") for layer in range(2)]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.LSTM(8, 64).to(DEVICES[0]), nn.LSTM(64, 64).to(DEVICES[1])])
        self.head = nn.Linear(64, 3).to(DEVICES[1])

    def forward(self, x: Tensor) -> Tensor:
        for layer, device in zip(self.layers, DEVICES, strict=True):
            # The second GPU waits for all time steps of the first; then the first waits for the second.
            x, _ = layer(x.to(device))
        return self.head(x[-1])


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
with np.load("series.npz") as series:
    x = torch.from_numpy(series["x"]).transpose(0, 1)  # [time, rows, channels]
    y = torch.from_numpy(series["y"]).to(DEVICES[-1])
for step in range(1, 11):
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(f"step {step}  loss {loss.item():.5f}")
