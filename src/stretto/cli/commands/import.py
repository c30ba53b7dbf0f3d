"""The command `stretto import`.

Convert a file of weights, so that a run can start from them (model.weights). FILE is a Keras model (.keras) or
its weights (.weights.h5), or a state dict of torch layers (.safetensors, .pt). No code in FILE is run.

example:
  stretto import model.keras --out weights.safetensors
  stretto train run.toml --model.weights weights.safetensors
"""  # noqa: N999 - the name of the command

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from stretto.base.disk import explain_write_errors, refuse_existing
from stretto.cli.parser import Parser

if TYPE_CHECKING:
    from torch import nn


def add_arguments(parser: Parser) -> None:
    parser.usage = "stretto import FILE --out WEIGHTS.safetensors"
    parser.add_argument("file", type=Path, metavar="FILE", help="a .keras, .weights.h5, .safetensors or .pt file")
    parser.add_argument("--out", type=Path, required=True, metavar="WEIGHTS.safetensors", help="file to write")


def run(options: argparse.Namespace) -> None:
    """Convert the weights, and print the blocks."""
    refuse_existing("--out", options.out)
    from stretto.cli.views.console import make_console
    from stretto.exchange.keras_import import from_keras
    from stretto.exchange.torch_import import from_torch
    from stretto.train.weights import save_weights

    is_keras = options.file.suffix in (".keras", ".h5")
    stack = from_keras(options.file) if is_keras else from_torch(options.file)
    with explain_write_errors(f"--out={options.out}"):
        save_weights(stack, options.out)
    console = make_console()
    for index, block in enumerate(stack):
        kind, sizes = _describe_block(block)
        console.print(f"block {index:<3} {kind:<18} {sizes}".rstrip())
    console.print(f"the weights are in {options.out}; set model.weights to this file to start a run from them")


def _describe_block(block: "nn.Module") -> tuple[str, str]:
    """Return the kind of a block, and its sizes as torch prints them."""
    inner = next(block.children(), None)
    if inner is None:
        return type(block).__name__, block.extra_repr()
    is_wrapper = type(block).__name__ in ("Residual", "Pointwise")
    kind, sizes = _describe_block(inner)
    return f"{type(block).__name__}({kind})" if is_wrapper else type(block).__name__, sizes
