"""The command `stretto plan`.

Find the fastest layout for a run on the given devices, and say why, and how much faster than one device it is. The
model is measured on this machine first, unless it was measured before, or --profile or --hardware is given.

example:
  stretto plan run.toml --devices 8
  stretto plan run.toml --try 5
  stretto plan run.toml --devices 4096 --nodes 512 --hardware H100 --html plan.html
  stretto plan my_model.py:build --rows 8 --steps 256 --devices 4 --hardware A100
"""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from stretto.base.disk import explain_write_errors, write_atomic
from stretto.base.errors import ConfigError
from stretto.cli.config_options import add_config_options, load_run_config
from stretto.cli.parser import Parser
from stretto.plan.hardware import find_hardware

if TYPE_CHECKING:
    from stretto.config.run import RunConfig
    from stretto.measure.profile_input import ProfileInput
    from stretto.plan.profile import Profile


def add_arguments(parser: Parser) -> None:
    parser.usage = (
        "stretto plan RUN.toml [--devices N] [--nodes N] [--memory 24GB] [--profile FILE | --hardware A100|H100] "
        "[--try N] [options] [--section.field VALUE ...]\n       "
        "stretto plan FILE.py:NAME --rows N --steps N --devices N --hardware A100|H100|L40S [--precision bf16] "
        "[--link NAME]"
    )
    add = parser.add_argument
    add("--devices", type=int, metavar="N", help="total number of devices (default: those of this machine)")
    add("--nodes", type=int, default=1, metavar="N", help="number of nodes (default: 1)")
    add("--memory", metavar="BYTES", help="memory per device, like 24GB (default: from the profile)")
    add("--profile", type=Path, metavar="FILE", help="profile written by `stretto profile`, or by hand")
    add("--hardware", metavar="NAME", help="plan for a different device, from its data sheet: A100 or H100")
    add("--intra-node-link", metavar="LINK", help="latency and bandwidth between devices of a node, like 3us,300GB/s")
    add("--inter-node-link", metavar="LINK", help="latency between nodes, and bandwidth per device, like 5us,25GB/s")
    add(
        "--try", dest="num_tried", type=int, default=0, metavar="N",
        help="run the N best layouts, and that in the config, for some steps on this machine, and choose by their "
        "measured time (default: 0)",
    )  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write the plan as JSON")
    add("--html", type=Path, metavar="FILE", help="write the plan as an HTML page")
    module = parser.add_argument_group("a module for `parallelize`, which FILE.py:NAME builds (nothing is measured)")
    module.add_argument("--rows", type=float, metavar="N", help="rows of each device; 0.5 is one row on two devices")
    module.add_argument("--steps", type=int, metavar="N", help="time steps of a row")
    module.add_argument("--precision", default="bf16", metavar="NAME", help="fp32, tf32 or bf16 (default: bf16)")
    module.add_argument(
        "--link", metavar="NAME", help="nvlink3, nvlink4, pcie4 or network (default: what --hardware has in a node)"
    )
    add_config_options(parser)


def run(options: argparse.Namespace) -> None:
    """Measure if necessary, search, and print the plan."""
    if ":" in str(options.config):
        _plan_module(options)
        return
    config = load_run_config(options)
    _check_hardware(options)
    _check_num_tried(options)
    from stretto.cli.quantities import parse_bytes
    from stretto.cli.views.console import make_console
    from stretto.cli.views.plan_tables import show_plan
    from stretto.measure.span_sweeps import find_span_obstacle
    from stretto.plan.cluster import Cluster
    from stretto.plan.cost_model import CostModel
    from stretto.plan.predict import predict_timeline
    from stretto.plan.search import find_plan
    from stretto.plan.serialize import plan_to_dict
    from stretto.planning.choose import try_plan_on_this_machine
    from stretto.planning.configured import compare_configured
    from stretto.planning.profiles import num_local_devices, profile_input_from_config
    from stretto.report.plan_page import plan_page

    memory = None if options.memory is None else parse_bytes("--memory", options.memory)
    for option, path in (("--json", options.json), ("--html", options.html)):
        if path is not None and not path.parent.is_dir():
            # Report this before minutes are spent on measuring.
            raise ConfigError(
                f"{option}={path} can't be written ({path.parent} does not exist); choose a different file"
            )
    profile_input = profile_input_from_config(config)
    devices = num_local_devices(profile_input.device) if options.devices is None else options.devices
    cluster = Cluster(devices, options.nodes, memory)
    if options.num_tried and not profile_input.is_cpu and devices > num_local_devices(profile_input.device):
        raise ConfigError(
            f"--try={options.num_tried} needs the devices that are planned for, but this machine has fewer than "
            f"--devices={devices}; leave out one or the other"
        )
    profile, workload = _choose_profile(options, config, profile_input), profile_input.workload
    plan = compare_configured(find_plan(profile, workload, cluster), config, profile_input, profile)
    if options.num_tried:
        plan = try_plan_on_this_machine(config, profile_input, profile, plan, options.num_tried)
    timeline = predict_timeline(CostModel(profile), workload, plan.chosen.layout, cluster)
    console = make_console(is_wrapped=True)
    if profile.fingerprint not in ("", profile_input.fingerprint):  # empty: estimated or written by hand
        console.print("note: the profile was measured with different hardware, torch version, model, batch or settings")
    obstacle = find_span_obstacle(profile_input.model)
    if obstacle is not None:
        console.print(f"note: no spans were considered: {obstacle}", soft_wrap=True)
    show_plan(console, plan, profile, timeline)
    if options.json:
        _write("--json", options.json, json.dumps(plan_to_dict(plan, profile, timeline), indent=1) + "\n")
    if options.html:
        _write("--html", options.html, plan_page(plan, profile, workload, timeline, str(options.config)))
    if paths := [str(path) for path in (options.json, options.html) if path]:
        console.print(f"\nthe plan is in {' and '.join(paths)}", soft_wrap=True)


def _plan_module(options: argparse.Namespace) -> None:
    """Print the layouts of the recurrent layers of a user's module."""
    needed = {name: getattr(options, name) for name in ("rows", "steps", "devices", "hardware")}
    if missing := [f"--{name}" for name, value in needed.items() if value is None]:
        raise ConfigError(
            f"{options.config} is a module, and needs {', '.join(missing)} too; see `stretto plan --help`"
        )
    import torch

    from stretto.cli.views.console import make_console
    from stretto.cli.views.module_plan import show_module_plan
    from stretto.planner.plan import plan_layouts
    from stretto.train.user_code import load_object

    build = load_object("module", str(options.config))
    with torch.device("meta"):
        module = build() if callable(build) else build
    if not isinstance(module, torch.nn.Module):
        raise ConfigError(f"{options.config} gave a {type(module).__name__}; it has to build a torch.nn.Module")
    plans = plan_layouts(module, **needed, precision=options.precision, link=options.link)
    show_module_plan(make_console(is_wrapped=True), module, plans)


def _check_hardware(options: argparse.Namespace) -> None:
    """Raise if `--hardware` is invalid, before torch is imported."""
    if options.hardware is None:
        return
    if options.profile is not None:
        raise ConfigError(
            f"--hardware={options.hardware} and --profile={options.profile} both choose the profile; leave one out"
        )
    find_hardware(options.hardware)


def _check_num_tried(options: argparse.Namespace) -> None:
    """Raise if layouts can't be tried, before anything is measured."""
    if options.num_tried < 0:
        raise ConfigError(f"--try={options.num_tried} must be at least 0; 0 tries no layout")
    if options.num_tried and (options.nodes > 1 or options.hardware is not None):
        other = f"--nodes={options.nodes}" if options.nodes > 1 else f"--hardware={options.hardware}"
        raise ConfigError(
            f"--try={options.num_tried} runs layouts on this machine, but {other} plans for another; leave out one or "
            "the other"
        )


def _choose_profile(options: argparse.Namespace, config: "RunConfig", profile_input: "ProfileInput") -> "Profile":
    from stretto.cli.quantities import parse_link
    from stretto.planning.profiles import derive_from_data_sheet, find_profile

    # Report an invalid link before minutes are spent on measuring.
    links = {
        field: parse_link(f"--{field.replace('_', '-')}-link", text)
        for field, text in (("intra_node", options.intra_node_link), ("inter_node", options.inter_node_link))
        if text is not None
    }
    if options.hardware is not None:
        profile = derive_from_data_sheet(options.hardware, profile_input)
    else:
        if options.profile is not None and not options.profile.is_file():
            raise ConfigError(f"--profile={options.profile} is not a file; create it with `stretto profile --out`")
        profile = find_profile(config, profile_input, options.profile)
    # The measured costs of all-reduces don't apply to a different link within a node.
    return profile.model_copy(update={**links, **({"all_reduces": ()} if "intra_node" in links else {})})


def _write(option: str, path: Path, text: str) -> None:
    with explain_write_errors(f"{option}={path}"):
        write_atomic(path, text.encode())
