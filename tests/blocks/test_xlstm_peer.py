"""MLSTM and SLSTM compute what the cells of the `xlstm` package do."""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from stretto.nn import MLSTM, SLSTM, Rows

STEPS, BATCH, IN, HEADS, SIZE = 150, 2, 3, 2, 4
HIDDEN = HEADS * SIZE


def by_head(tensor: Tensor) -> Tensor:
    """[time, batch, heads * size] -> [batch, heads, time, size]."""
    return tensor.unflatten(-1, (HEADS, -1)).permute(1, 2, 0, 3)  # type: ignore[no-untyped-call,no-any-return]


@pytest.mark.peers
def test_xlstm_computes_the_same(tmp_path: Path) -> None:
    python = os.environ.get("STRETTO_XLSTM_PYTHON")
    if not python:
        pytest.skip("STRETTO_XLSTM_PYTHON does not name a Python that has xlstm 2.0")
    torch.manual_seed(1)
    mlstm, slstm = MLSTM(IN, HIDDEN, HEADS).double(), SLSTM(IN, HIDDEN, HEADS).double()
    for parameter in [*mlstm.parameters(), *slstm.parameters()]:
        torch.nn.init.normal_(parameter)
    x = torch.randn(STEPS, BATCH, IN, dtype=torch.float64)
    with torch.no_grad():
        rows = Rows.of(BATCH, dtype=torch.float64)
        (m_outputs, _), (s_outputs, _) = (block(x, block.begin(rows)) for block in (mlstm, slstm))
        q, k, v, o = mlstm.inputs(x).chunk(4, dim=-1)
        i, f = mlstm.gates(x).chunk(2, dim=-1)
        arrays = {"q": by_head(q), "k": by_head(k), "v": by_head(v), "i": by_head(i), "f": by_head(f)}
        # xlstm has the gates first, then the heads; here it is the other way round.
        gates = slstm.inputs(x).unflatten(-1, (HEADS, 4, SIZE)).transpose(2, 3).flatten(2)
        arrays |= {"x": gates, "bias": torch.zeros(4 * HIDDEN), "weight": slstm.weight_hh.mT}
        arrays |= {"state": torch.zeros(4, BATCH, HIDDEN)}
    contents = {name: tensor.detach().double().contiguous().numpy() for name, tensor in arrays.items()}
    np.savez(tmp_path / "in.npz", **contents)  # type: ignore[arg-type]
    script = Path(__file__).with_name("run_xlstm.py")
    command = [python, str(script), str(tmp_path / "in.npz"), str(tmp_path / "out.npz")]
    subprocess.run(command, check=True, capture_output=True, timeout=280)
    theirs = {name: torch.from_numpy(array) for name, array in np.load(tmp_path / "out.npz").items()}
    ours = by_head(m_outputs / o.sigmoid())  # xlstm's cell has no output gate
    torch.testing.assert_close(ours, theirs["mlstm"], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(ours, theirs["mlstm_steps"], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(s_outputs, theirs["slstm"], rtol=1e-9, atol=1e-9)
