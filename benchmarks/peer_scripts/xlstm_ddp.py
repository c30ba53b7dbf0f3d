"""The xlstm package's mLSTM layers instead of LSTM layers: another model, so only its time is compared."""

import torch
from case import Case
from torch import nn
from torch_model import serve_ddp
from xlstm import mLSTMBlockConfig, mLSTMLayerConfig, xLSTMBlockStack, xLSTMBlockStackConfig


def make_model(case: Case) -> nn.Module:
    torch.manual_seed(1)
    config = xLSTMBlockStackConfig(
        mlstm_block=mLSTMBlockConfig(mlstm=mLSTMLayerConfig(num_heads=4)),
        context_length=case.steps,
        num_blocks=case.layers,
        embedding_dim=case.hidden,
    )
    return nn.Sequential(xLSTMBlockStack(config), nn.Linear(case.hidden, case.num_outputs))


serve_ddp(make_model)
