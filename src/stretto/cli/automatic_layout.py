"""`layout.auto`: choose the layout of a run before it starts, and print why."""

import json

import torch
from rich.console import Console

from stretto.base.run_folder import PLAN, RunFolder
from stretto.base.units import format_seconds
from stretto.cli.views.console import make_console
from stretto.cli.views.progress import show_measurements
from stretto.config.layout import Layout
from stretto.config.run import RunConfig
from stretto.mesh.world import World
from stretto.plan.advice import advise, describe_trials
from stretto.plan.serialize import plan_to_dict
from stretto.planning.choose import LayoutChoice, choose_on_ranks, choose_on_this_machine
from stretto.planning.profiles import profile_input_from_config


def choose_layout_locally(config: RunConfig, *, saves_plan: bool) -> RunConfig:
    """Return the config with the fastest layout for the devices of this machine."""
    return _apply_choice(config, choose_on_this_machine(config), make_console(), saves_plan=saves_plan)


def choose_layout_on_ranks(config: RunConfig, world: World, *, saves_plan: bool) -> RunConfig:
    """Return the config with the fastest layout for the ranks of this job."""
    console = make_console(is_quiet=not world.is_rank_zero)
    # Keep the number of threads per rank that the launcher has set.
    profile_input = profile_input_from_config(config, torch.get_num_threads(), world.device)
    with show_measurements(console) as progress:
        num_tried = config.run.try_layouts
        choice = choose_on_ranks(profile_input, world, config.data.cache, progress, try_finalists=num_tried)
    return _apply_choice(config, choice, console, saves_plan=saves_plan and world.is_rank_zero)


def layout_arguments(layout: Layout) -> list[str]:
    """Return options for all fields of a layout, so that ranks launched with them use it and don't choose again."""
    arguments = []
    for name, value in layout.model_dump(mode="json").items():
        if name == "blocks":
            value = ",".join(map(str, value))
        arguments += [f"--layout.{name}", str(value).lower() if isinstance(value, bool) else str(value)]
    return arguments


def _apply_choice(config: RunConfig, choice: LayoutChoice, console: Console, *, saves_plan: bool) -> RunConfig:
    """Print the choice, save its plan if `saves_plan`, and return the config with the chosen layout."""
    console.print(f"plan    {advise(choice.plan)}")
    tried = choice.plan.measured_seconds(choice.layout)
    measured = "" if tried is None else f", measured in the trial: {format_seconds(tried)}"
    console.print(f"plan    predicted: {format_seconds(choice.plan.chosen.seconds)} per step{measured}")
    if choice.plan.trials:
        console.print(f"plan    {describe_trials(choice.plan)}")
    if saves_plan:
        plan = plan_to_dict(choice.plan, choice.profile, choice.timeline)
        RunFolder(config.run.folder).write(PLAN, f"{json.dumps(plan, indent=1)}\n".encode())
    layout = choice.layout.model_copy(update={"elastic": config.layout.elastic})
    return config.model_copy(update={"layout": layout})
