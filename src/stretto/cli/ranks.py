"""Ranks: a command that needs several of them starts them itself, unless torchrun has done so."""

import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from stretto.base.errors import StrettoError
from stretto.config.run import RunConfig
from stretto.mesh.world import TOLD, World, world
from stretto.train.run import check_fits


def on_ranks(
    config: RunConfig,
    arguments: list[str],
    work: Callable[[World], None],
    check: Callable[[RunConfig], object] = check_fits,
) -> None:
    """Do `work` on each rank that the layout needs; `arguments` are those that start this command again.

    `check` is what can be found wrong before ranks are started, so that it is said just once.
    """
    size = config.layout.num_ranks
    if size > 1 and "WORLD_SIZE" not in os.environ:
        from stretto.launch.local import launch_local

        check(config)
        launch_local(size, arguments)
        return
    with world(size, device=config.run.device) as joined:
        try:
            work(joined)
        except TOLD as error:
            if joined.is_alone:
                raise
            # On every rank or on one alone: all end with it, and one of them says it.
            sentence = f"stretto: error: {error}"
            joined.tell(error, lambda: print(sentence, file=sys.stderr, flush=True))
            leave(error.exit_code)
        except KeyboardInterrupt:
            if joined.is_first:
                raise
            leave(130)
        except StrettoError:
            raise
        except Exception:
            if joined.is_alone:
                raise
            # A bug, in a block of the user's perhaps. No farewell: groups that still wait would abort the process.
            traceback.print_exc()
            leave(1)


def leave(exit_code: int) -> NoReturn:
    """End this process at once, so that others see its connections close."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
