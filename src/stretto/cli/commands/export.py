"""The command `stretto export`.

Export the model of a run, or of a checkpoint. An ONNX model has the state as named inputs and outputs, and takes any
number of time steps and rows; it is checked with onnxruntime if that is installed.

example:
  stretto export runs/first --onnx first.onnx
  stretto export runs/first --torch first.safetensors
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from stretto.base.disk import refuse_existing
from stretto.base.errors import ConfigError
from stretto.base.extras import install_command
from stretto.cli.parser import RUN_HELP, Parser, add_location_argument, add_trust_argument

if TYPE_CHECKING:
    from rich.console import Console

    from stretto.exchange.onnx_export import OnnxExport


_DECODING = {
    "ctc": "take the largest of each time step, merge repeated ones, remove the blank (class 0)",
    "crf": "with the Viterbi algorithm, and the transitions in the metadata stretto.decoding",
}


def add_arguments(parser: Parser) -> None:
    parser.usage = "stretto export RUN [--onnx FILE] [--torch FILE] [--trust] [--allow-location URL]"
    add = parser.add_argument
    add("run", metavar="RUN", help=RUN_HELP)
    add("--onnx", type=Path, metavar="FILE", help="write an ONNX model (needs the extra stretto[onnx])")
    add("--torch", type=Path, metavar="FILE", help="write safetensors with the parameter names of nn.LSTM etc.")
    add_trust_argument(parser)
    add_location_argument(parser)


def run(options: argparse.Namespace) -> None:
    """Export, and print what the files hold."""
    if options.onnx is None and options.torch is None:
        raise ConfigError("nothing to export; use --onnx=FILE, --torch=FILE or both")
    if options.onnx == options.torch:
        raise ConfigError(f"--onnx and --torch are both {options.onnx}; choose two different files")
    for option, path in (("--onnx", options.onnx), ("--torch", options.torch)):
        if path is not None:
            refuse_existing(option, path)
    from stretto.cli.run_model import load_run_model
    from stretto.cli.views.console import make_console

    trained = load_run_model(options, "cpu")
    console = make_console()
    if options.onnx is not None:
        from stretto.exchange.onnx_export import export_onnx

        _print_onnx(console, export_onnx(trained, options.onnx))
    if options.torch is not None:
        from stretto.exchange.torch_export import POOLING_KINDS, export_torch

        for name, spec in export_torch(trained.stack, options.torch).items():
            arguments = ", ".join(f"{key}={value}" for key, value in spec.items() if key not in ("kind", "residual"))
            residual = ", with a residual connection" if spec.get("residual") else ""
            package = "stretto.nn" if spec["kind"] in POOLING_KINDS else "nn"
            console.print(f"{name:<11} {package}.{spec['kind']}({arguments}){residual}")
        console.print(f"the weights of these modules are in {options.torch}")
        if trained.data_spec.channels is not None and trained.config.data.scale == "standard":
            console.print("their inputs are (value - mean) / std, with the mean and std in the run's data_spec.json")


def _print_onnx(console: "Console", exported: "OnnxExport") -> None:
    state_names = [name for name in exported.inputs if name != "x"]
    console.print(f"in    x{''.join(f', {name}' for name in state_names)}")
    console.print(f"out   y{''.join(f', {name}.next' for name in state_names)}")
    if exported.decoding is not None:
        console.print(f"y are scores; decode them yourself: {_DECODING[exported.decoding]}")
    if exported.max_difference is None:
        verdict = f"not checked, because onnxruntime is not installed: {install_command('onnx')}"
    else:
        verdict = f"checked with onnxruntime: the largest difference from torch is {exported.max_difference:.1e}"
    console.print(f"the model is in {exported.path}; {verdict}")
