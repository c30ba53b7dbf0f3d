"""PyTorch by hand with packed sequences, for rows of unequal lengths: one device, or DistributedDataParallel."""

import torch
from case import Case, read_case
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch_model import Model, serve_ddp


class PackedModel(Model):
    """Leaves out the padding."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        _, rank, size = read_case()
        self.lengths = torch.from_numpy(case.batch(rank, size)[2])

    def forward(self, x: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embedding(x), self.lengths, batch_first=True, enforce_sorted=False)
        y, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=x.shape[1])
        return self.head(y)


serve_ddp(PackedModel)
