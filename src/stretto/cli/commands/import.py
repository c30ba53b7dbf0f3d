"""`stretto import`: weights of torch's or Keras's layers as weights that a run can begin with."""  # noqa: N999 - the name of the command

from pathlib import Path
from typing import TYPE_CHECKING

from stretto.base.errors import ConfigError
from stretto.cli.parser import Parser, refuse_existing

if TYPE_CHECKING:
    from torch import nn


def run(arguments: list[str]) -> None:
    """Parse, convert, and say what was found."""
    options = make_parser().parse_all(arguments)
    refuse_existing("--out", options.out)
    from stretto.cli.views.console import make_console
    from stretto.exchange.keras_import import from_keras
    from stretto.exchange.torch_import import from_torch
    from stretto.train.weights import save_weights

    is_keras = options.file.suffix in (".keras", ".h5")
    stack = from_keras(options.file) if is_keras else from_torch(options.file)
    try:
        save_weights(stack, options.out)
    except OSError as error:
        raise ConfigError(f"--out={options.out} can't be written ({error.strerror}); choose another file") from None
    console = make_console()
    for index, block in enumerate(stack):
        kind, sizes = _describe_block(block)
        console.print(f"block {index:<3} {kind:<18} {sizes}".rstrip())
    console.print(f"weights are in {options.out}; a run begins with them if model.weights names the file")


def _describe_block(block: "nn.Module") -> tuple[str, str]:
    """What a block is, and its sizes as torch says them."""
    inner = next(block.children(), None)
    if inner is None:
        return type(block).__name__, block.extra_repr()
    is_wrapper = type(block).__name__ in ("Residual", "Pointwise")
    kind, sizes = _describe_block(inner)
    return f"{type(block).__name__}({kind})" if is_wrapper else type(block).__name__, sizes


def make_parser() -> Parser:
    """Return the command's parser."""
    parser = Parser(
        prog="stretto import",
        usage="stretto import FILE --out WEIGHTS.safetensors",
        description="Turn a file of weights into one that a run can begin with (model.weights). FILE is what Keras\n"
        "saved (.keras, .weights.h5), or a state dict of torch's layers (.safetensors, .pt). No code in it is run.",
        epilog="example:\n  stretto import model.keras --out weights.safetensors\n"
        "  stretto train run.toml --model.weights weights.safetensors",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="a .keras, .weights.h5, .safetensors or .pt file")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the safetensors file to write")
    return parser
