"""`stretto export`: the model of a run as an ONNX model, or as weights of torch modules."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from stretto.base.errors import ConfigError
from stretto.cli.output_files import refuse_existing
from stretto.cli.parser import Parser, add_trust_argument

if TYPE_CHECKING:
    from stretto.exchange.onnx_export import OnnxExport


def run(arguments: list[str]) -> None:
    """Parse, export, and print what the files hold."""
    with make_parser().parsed(arguments) as options:
        _export(options)


def _export(options: argparse.Namespace) -> None:
    if options.onnx is None and options.torch is None:
        raise ConfigError("nothing to export; use --onnx=FILE, --torch=FILE or both")
    if options.onnx == options.torch:
        raise ConfigError(f"--onnx and --torch are both {options.onnx}; choose two different files")
    for option, path in (("--onnx", options.onnx), ("--torch", options.torch)):
        if path is not None:
            refuse_existing(option, path)
    from stretto.cli.views.console import make_console
    from stretto.train.trained_model import load_model

    trained = load_model(options.run, "cpu", trust=options.trust)
    console = make_console()
    if options.onnx is not None:
        from stretto.exchange.onnx_export import export_onnx

        exported = export_onnx(trained, options.onnx)
        for line in _onnx_lines(exported):
            console.print(line)
    if options.torch is not None:
        from stretto.exchange.to_torch import export_torch

        for name, module in export_torch(trained.stack, options.torch).items():
            sizes = ", ".join(f"{key}={value}" for key, value in module.items() if key not in ("kind", "residual"))
            residual = ", with a residual connection" if module.get("residual") else ""
            console.print(f"{name:<11} nn.{module['kind']}({sizes}){residual}")
        console.print(f"the weights of these modules are in {options.torch}")


def _onnx_lines(exported: "OnnxExport") -> list[str]:
    states = [name for name in exported.inputs if name != "x"]
    if exported.max_difference is None:
        verdict = "not checked, because onnxruntime is not installed: pip install 'stretto[onnx]'"
    else:
        verdict = f"checked with onnxruntime: the largest difference from torch is {exported.max_difference:.1e}"
    return [
        f"in    x{''.join(f', {name}' for name in states)}",
        f"out   y{''.join(f', {name}.after' for name in states)}",
        f"the model is in {exported.path}; {verdict}",
    ]


def make_parser() -> Parser:
    """Return the command's parser."""
    parser = Parser(
        prog="stretto export",
        usage="stretto export RUN [--onnx FILE] [--torch FILE] [--trust]",
        description="Export the model of a run, or of a checkpoint. An ONNX model has the state as named inputs and "
        "outputs, and takes any number of steps and rows; it is checked with onnxruntime if that is installed.",
        epilog="example:\n  stretto export runs/first --onnx first.onnx\n"
        "  stretto export runs/first --torch first.safetensors",
    )
    parser.add_argument("run", metavar="RUN", help="folder of the run, or a checkpoint")
    parser.add_argument(
        "--onnx", type=Path, metavar="FILE", help="write an ONNX model (needs `pip install 'stretto[onnx]'`)"
    )
    parser.add_argument(
        "--torch",
        type=Path,
        metavar="FILE",
        help="write a safetensors file with the parameter names of nn.LSTM, nn.Linear, ...",
    )
    add_trust_argument(parser)
    return parser
