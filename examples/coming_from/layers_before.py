"""A language model with a layer on each GPU, by hand.

python layers_before.py    # reads book.txt, writes layers.safetensors: the weights it started from
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

State = list[tuple[Tensor, Tensor]]
NUM_GPUS = torch.cuda.device_count()
DEVICES = [torch.device("cuda", place % NUM_GPUS) if NUM_GPUS else torch.device("cpu") for place in range(2)]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 64).to(DEVICES[0])
        self.layers = nn.ModuleList(nn.LSTM(64, 64).to(device) for device in DEVICES)
        self.head = nn.Linear(64, 256).to(DEVICES[-1])

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        x, after = self.embedding(x.to(DEVICES[0])), []
        for layer, device, before in zip(self.layers, DEVICES, state, strict=True):
            # The second GPU waits for the whole window of the first, then the first waits for the second.
            x, last = layer(x.to(device), before)
            after.append(last)
        return self.head(x), after


torch.manual_seed(0)
model = Model()
save_file(model.state_dict(), "layers.safetensors")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)

# Sixteen streams, side by side: [steps, rows].
book = torch.tensor(list(Path("book.txt").read_bytes()))
inputs, targets = (text.view(16, -1).t() for text in (book[:-1], book[1:]))

state: State = [tuple(torch.zeros(2, 1, 16, 64, device=device).unbind()) for device in DEVICES]
for step, start in enumerate(range(0, len(inputs), 64), 1):
    y, state = model(inputs[start : start + 64], state)
    state = [(h.detach(), c.detach()) for h, c in state]
    loss = F.cross_entropy(y.flatten(0, 1), targets[start : start + 64].flatten().to(y.device))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(f"step {step}  loss {loss.item():.5f}")
