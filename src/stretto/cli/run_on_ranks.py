"""Ranks: a command that needs several of them starts them itself, unless a launcher has done so."""

import json
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
from rich.console import Console

from stretto.base.errors import LostPeerError, StrettoError
from stretto.base.run_folder import RunFolder
from stretto.cli.views.console import make_console
from stretto.cli.views.progress import show_progress
from stretto.config.layout import Layout
from stretto.config.run import RunConfig
from stretto.launch.parent_exit import exit_with_launcher, preempted_exit_code
from stretto.mesh.join import world
from stretto.mesh.launch_info import find_launch_info
from stretto.mesh.world import SHARED_ERRORS, World
from stretto.plan.advice import advise
from stretto.plan.serialize import plan_to_dict
from stretto.plan.units import format_seconds
from stretto.planning.choose import LayoutChoice, choose_on_ranks, choose_on_this_machine
from stretto.planning.profiles import profile_input_from_config
from stretto.train.build import fit_to_ranks, validate_config
from stretto.train.plan_check import save_plan
from stretto.train.run import PreemptedError, newest_checkpoint
from stretto.train.signals import on_preemption_signal

# How often ranks are started again by default, if they were started here.
_MAX_RESTARTS = 3


def run_on_ranks(
    config: RunConfig,
    arguments: list[str],
    function: Callable[[World, RunConfig], None],
    check: Callable[[RunConfig], object] = validate_config,
    *,
    restarts: int | None = 0,
    progress: Callable[[], object] | None = None,
    saves_plan: bool = False,
) -> None:
    """Do `work` on each rank that the layout needs; `arguments` are those that start this command again.

    `check` is what can be found wrong before ranks are started, so that it is said just once. Ranks that were lost
    are started again `restarts` times without `progress` (another checkpoint, if not given); with none given, a few
    times if there are several. A layout that is left to us is chosen first; `saves_plan` writes why into
    the run's folder.
    """
    launch_info = find_launch_info(os.environ)
    if config.layout.auto and launch_info is None:
        config = _plan_locally(config, check, saves_plan)
        arguments = [*arguments, *layout_arguments(config.layout)]
    size = config.layout.num_ranks
    if (size > 1 or restarts) and launch_info is None:
        from stretto.launch.local import launch_local

        with on_preemption_signal(lambda: exit_immediately(preempted_exit_code())):
            check(config)
        try:
            launch_local(
                size,
                arguments,
                restarts=_MAX_RESTARTS if restarts is None else restarts,
                progress=progress or (lambda: newest_checkpoint(config)),
                on_message=lambda what: print(f"stretto: {what}", file=sys.stderr, flush=True),
            )
        finally:
            # A rank that was killed while it drew has left it hidden.
            make_console().show_cursor()
        return
    exit_with_launcher()
    if launch_info is not None:
        config = fit_to_ranks(config, launch_info.size)
        size = config.layout.num_ranks
    timeout = timedelta(seconds=config.run.timeout)
    with (
        # Until there is a step to save, there is nothing to do but go.
        on_preemption_signal(lambda: exit_immediately(preempted_exit_code())),
        world(None if config.layout.auto else size, device=config.run.device, timeout=timeout) as joined,
    ):
        try:
            if config.layout.auto:
                config = _plan_on_ranks(config, joined, saves_plan)
            function(joined, config)
        except SHARED_ERRORS as error:
            if joined.is_single_rank:
                raise
            # On every rank or on one alone: all end with it, and one of them says it.
            sentence = f"stretto: error: {error}"
            joined.publish_error(error, lambda: print(sentence, file=sys.stderr, flush=True))
            exit_immediately(error.exit_code)
        except PreemptedError as left:
            # All ranks exit_immediately after the same step, and one of them says so.
            if joined.is_rank_zero:
                print(f"stretto: {left}", file=sys.stderr, flush=True)
            exit_immediately(preempted_exit_code())
        except KeyboardInterrupt:
            if joined.is_rank_zero:
                raise
            exit_immediately(130)
        except LostPeerError as error:
            # The connections that are left may wait for ever when Python closes them.
            print(f"stretto: error: {error}", file=sys.stderr, flush=True)
            exit_immediately(error.exit_code)
        except StrettoError:
            raise
        except Exception:
            if joined.is_single_rank:
                raise
            # A bug, in a block of the user's perhaps. No farewell: groups that still wait would abort the process.
            traceback.print_exc()
            exit_immediately(1)


def _plan_locally(config: RunConfig, check: Callable[[RunConfig], object], saves_plan: bool) -> RunConfig:
    with on_preemption_signal(lambda: exit_immediately(preempted_exit_code())):
        # What is wrong with the run is said before minutes are spent on measuring it.
        check(config.model_copy(update={"layout": Layout()}))
    choice = choose_on_this_machine(config)
    _show_choice(make_console(), choice)
    return _use(choice, config, config.run.folder if saves_plan else None)


def _plan_on_ranks(config: RunConfig, joined: World, saves_plan: bool) -> RunConfig:
    console = make_console(is_quiet=not joined.is_rank_zero)
    # Torchrun has set how many threads each rank has, and so they stay.
    profile_input = profile_input_from_config(config, torch.get_num_threads(), joined.device)
    with show_progress(console) as progress:
        choice = choose_on_ranks(profile_input, joined, config.data.cache, progress)
    _show_choice(console, choice)
    return _use(choice, config, config.run.folder if saves_plan and joined.is_rank_zero else None)


def _show_choice(console: Console, choice: LayoutChoice) -> None:
    console.print(f"plan    {advise(choice.plan)}")
    console.print(f"plan    predicted: {format_seconds(choice.plan.chosen.seconds)} per step")


def _use(choice: LayoutChoice, config: RunConfig, folder: Path | None) -> RunConfig:
    """The config in the layout that was chosen; the plan goes into the run's folder, if one is given."""
    if folder is not None:
        save_plan(RunFolder(folder), json.dumps(plan_to_dict(choice.plan, choice.profile, choice.timeline), indent=1))
    layout = choice.layout.model_copy(update={"elastic": config.layout.elastic})
    return config.model_copy(update={"layout": layout})


def layout_arguments(layout: Layout) -> list[str]:
    """Return the options that ask for a layout."""
    values = layout.model_dump(mode="json")
    found = []
    for name, value in values.items():
        if name == "blocks":
            value = ",".join(map(str, value))
        found += [f"--layout.{name}", str(value).lower() if isinstance(value, bool) else str(value)]
    return found


def exit_immediately(exit_code: int) -> NoReturn:
    """End this process at once, so that others see its connections close."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
