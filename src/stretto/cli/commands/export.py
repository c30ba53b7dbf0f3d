"""`stretto export`: a run's model for use elsewhere, as an ONNX model or as weights of torch's own modules."""

from pathlib import Path
from typing import TYPE_CHECKING

from stretto.base.errors import ConfigError
from stretto.cli.parser import Parser, refuse_existing

if TYPE_CHECKING:
    from stretto.exchange.onnx_export import OnnxExport


def run(arguments: list[str]) -> None:
    """Parse, export, and say what is in the files."""
    options = make_parser().parse_all(arguments)
    if options.onnx is None and options.torch is None:
        raise ConfigError("nothing to export to; give --onnx FILE, --torch FILE or both")
    if options.onnx == options.torch:
        raise ConfigError(f"--onnx and --torch are both {options.onnx}; give two files")
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
            arguments_of = ", ".join(
                f"{key}={value}" for key, value in module.items() if key not in ("kind", "residual")
            )
            added = ", its input added to its output" if module.get("residual") else ""
            console.print(f"{name:<11} nn.{module['kind']}({arguments_of}){added}")
        console.print(f"weights by these names are in {options.torch}")


def _onnx_lines(exported: "OnnxExport") -> list[str]:
    states = [name for name in exported.inputs if name != "x"]
    if exported.max_difference is None:
        verdict = "not checked: there is no onnxruntime; pip install 'stretto[onnx]'"
    else:
        verdict = f"checked with onnxruntime: equal to torch to {exported.max_difference:.1e}"
    return [
        f"in    x{''.join(f', {name}' for name in states)}",
        f"out   y{''.join(f', {name}.after' for name in states)}",
        f"model is in {exported.path}; {verdict}",
    ]


def make_parser() -> Parser:
    """Return the command's parser."""
    parser = Parser(
        prog="stretto export",
        usage="stretto export RUN [--onnx FILE] [--torch FILE] [--trust]",
        description="Write the model of a run, or of a checkpoint, for use elsewhere. An ONNX model takes and gives\n"
        "the state by name, for any number of steps and rows; it is checked with onnxruntime if that is installed.",
        epilog="example:\n  stretto export runs/first --onnx first.onnx\n"
        "  stretto export runs/first --torch first.safetensors",
    )
    parser.add_argument("run", metavar="RUN", help="the run's folder, or a checkpoint")
    parser.add_argument("--onnx", type=Path, metavar="FILE", help="write an ONNX model (needs the extra `onnx`)")
    parser.add_argument(
        "--torch",
        type=Path,
        metavar="FILE",
        help="write safetensors with the names of torch's own nn.LSTM, nn.Linear, ...",
    )
    parser.add_argument(
        "--trust", action="store_true", help="run the code that the run's model.factory or model.loss names"
    )
    return parser
