"""Runs the cells of the `xlstm` package on the arrays of a file, and writes their outputs to another file."""

import sys

import numpy as np
import torch
from xlstm.blocks.mlstm.backends import parallel_stabilized_simple, recurrent_step_stabilized_simple
from xlstm.blocks.slstm.src.vanilla import slstm_forward, slstm_pointwise_function_registry


def main(inputs_path: str, outputs_path: str) -> None:
    """Read the inputs of both cells; write `mlstm`, `mlstm_steps` and `slstm`."""
    arrays = {name: torch.from_numpy(array) for name, array in np.load(inputs_path).items()}
    names = {"queries": "q", "keys": "k", "values": "v", "igate_preact": "i", "fgate_preact": "f"}
    at_once = parallel_stabilized_simple(**{name: arrays[key] for name, key in names.items()}, eps=0.0)
    q, k, v, i, f = (torch.split(arrays[key], 1, dim=2) for key in names.values())
    batch, heads, _, size = arrays["q"].shape
    options = {"dtype": at_once.dtype}
    c, n, m = (torch.zeros(batch, heads, *shape, **options) for shape in ((size, size), (size, 1), (1, 1)))
    steps = []
    for inputs in zip(q, k, v, i, f, strict=True):
        h, (c, n, m) = recurrent_step_stabilized_simple(c, n, m, *(tensor.clone() for tensor in inputs), eps=0.0)
        steps.append(h)
    pointwise = slstm_pointwise_function_registry["slstm"]
    states, _, _ = slstm_forward(arrays["x"], arrays["state"], arrays["weight"], arrays["bias"], pointwise)
    np.savez(outputs_path, mlstm=at_once, mlstm_steps=torch.cat(steps, dim=2), slstm=states[0, 1:])


main(*sys.argv[1:])
