"""PyTorch by hand: one device, or DistributedDataParallel."""

from torch_model import Model, serve_ddp

serve_ddp(Model)
