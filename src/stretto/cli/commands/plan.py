"""`stretto plan`: the fastest layout of a run for some devices, or that one device is enough."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from stretto.base.disk import write_atomic
from stretto.base.errors import ConfigError
from stretto.cli.config_options import add_config_options, config_overrides
from stretto.cli.output_files import write_errors
from stretto.cli.parser import Parser
from stretto.config.toml import load_config

if TYPE_CHECKING:
    from stretto.config.run import RunConfig
    from stretto.measure.profile_input import ProfileInput
    from stretto.plan.profile import Profile


def run(arguments: list[str]) -> None:
    """Parse, measure if necessary, search, and print the plan."""
    with make_parser().parsed(arguments) as options:
        _plan(options)


def _plan(options: argparse.Namespace) -> None:
    config = load_config(options.config, config_overrides(options))
    from stretto.cli.quantities import parse_bytes
    from stretto.cli.views.console import make_console
    from stretto.cli.views.plan_tables import show_plan
    from stretto.plan.cluster import Cluster
    from stretto.plan.cost_model import CostModel
    from stretto.plan.predict import predict_timeline
    from stretto.plan.search import find_plan
    from stretto.plan.serialize import plan_to_dict
    from stretto.planning.profiles import num_local_devices, profile_input_from_config
    from stretto.report.plan_page import plan_page

    memory = None if options.memory is None else parse_bytes("--memory", options.memory)
    for option, path in (("--json", options.json), ("--html", options.html)):
        if path is not None and not path.parent.is_dir():
            # Reported before minutes are spent on measuring.
            raise ConfigError(
                f"{option}={path} can't be written ({path.parent} does not exist); choose a different file"
            )
    profile_input = profile_input_from_config(config)
    devices = num_local_devices(profile_input.device) if options.devices is None else options.devices
    cluster = Cluster(devices, options.nodes, memory)
    profile, workload = _profile(options, config, profile_input), profile_input.workload
    plan = find_plan(profile, workload, cluster)
    timeline = predict_timeline(CostModel(profile), workload, plan.chosen.layout, cluster)
    console = make_console(is_wrapped=True)
    if profile.key not in ("", profile_input.key):
        console.print("note: the profile was measured for a different model, batch, device, optimizer or torch version")
    show_plan(console, plan, profile, timeline)
    if options.json:
        _write("--json", options.json, json.dumps(plan_to_dict(plan, profile, timeline), indent=1) + "\n")
    if options.html:
        _write("--html", options.html, plan_page(plan, profile, workload, timeline, str(options.config)))


def _profile(options: argparse.Namespace, config: "RunConfig", profile_input: "ProfileInput") -> "Profile":
    from stretto.cli.quantities import parse_link
    from stretto.planning.profiles import derive_from_data_sheet, find_profile

    if options.hardware is not None:
        if options.profile is not None:
            raise ConfigError(
                f"--hardware={options.hardware} and --profile={options.profile} are two profiles; leave one of them out"
            )
        profile = derive_from_data_sheet(options.hardware, profile_input)
    else:
        if options.profile is not None and not options.profile.is_file():
            raise ConfigError(f"--profile={options.profile} is not a file; create it with `stretto profile --out`")
        profile = find_profile(config, profile_input, options.profile)
    links = {
        field: parse_link(f"--{field}", text)
        for field, text in (("node", options.node), ("network", options.network))
        if text is not None
    }
    # All-reduces that were measured over a different link don't apply to this one.
    return profile.model_copy(update={**links, **({"all_reduces": ()} if "node" in links else {})})


def _write(option: str, path: Path, text: str) -> None:
    with write_errors(option, path):
        write_atomic(path, text.encode())


def make_parser() -> Parser:
    """Return the command's parser."""
    parser = Parser(
        prog="stretto plan",
        usage="stretto plan RUN.toml [--devices N] [--nodes N] [--memory 24GB] [--profile FILE | --hardware A100|H100] "
        "[--section.field VALUE ...]",
        description="Find the fastest layout of a run for some devices, and say by how much and why. The model is "
        "measured on this machine first, unless that was done before or a profile is given.",
        epilog="example:\n  stretto plan run.toml --devices 8\n"
        "  stretto plan run.toml --devices 4096 --nodes 512 --hardware H100 --html plan.html",
    )
    parser.add_argument("config", type=Path, metavar="RUN.toml", help="TOML file of the run")
    parser.add_argument(
        "--devices", type=int, metavar="N", help="total number of devices (default: those of this machine)"
    )
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="number of nodes (default: 1)")
    parser.add_argument("--memory", metavar="BYTES", help="memory per device, like 24GB (default: from the profile)")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="profile written by `stretto profile`, or by hand")
    parser.add_argument("--hardware", metavar="NAME", help="plan for a different device: A100 or H100")
    parser.add_argument(
        "--node", metavar="LINK", help="latency and bandwidth between devices of a node, like 3us,300GB"
    )
    parser.add_argument(
        "--network", metavar="LINK", help="latency and bandwidth per device between nodes, like 5us,25GB"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the plan as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the plan as an HTML page")
    add_config_options(parser)
    return parser
