"""How a rank exits after an error, so that the other ranks exit too instead of waiting for it."""

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from stretto.base.errors import SHARED_ERRORS, LostPeerError, SavedInterrupt, StrettoError
from stretto.base.exit import exit_immediately
from stretto.launch.parent_exit import preempted_exit_code
from stretto.mesh.world import World
from stretto.train.events import PreemptedError
from stretto.train.weight_check import CorruptionError


@contextmanager
def exit_on_error(world: World) -> Iterator[None]:
    """Exit this process after an error inside the context, so that the other ranks exit too.

    Raised again instead, for `main` to print: errors in a job of one rank (except for a preemption), Ctrl-C on rank 0,
    and any StrettoError neither in SHARED_ERRORS (published to all ranks) nor about a preemption or a lost rank.
    """
    try:
        with _stop_watchdog_on_error(world):
            yield
    except SHARED_ERRORS as error:
        if world.is_single_rank:
            raise
        # The error may be on all ranks or only on this one. Either way, one rank prints it and all exit with this code.
        message = f"stretto: error: {error}"
        world.publish_error(error, lambda: print(message, file=sys.stderr, flush=True))
        exit_immediately(error.exit_code)
    except PreemptedError as error:
        # All ranks stop after the same step, so one message is enough.
        if world.is_rank_zero:
            print(f"stretto: {error}", file=sys.stderr, flush=True)
        exit_immediately(preempted_exit_code())
    except CorruptionError as error:
        # On all ranks, after the same check. A restart gets a good state, so this is like a lost rank.
        if world.is_rank_zero:
            print(f"stretto: error: {error}", file=sys.stderr, flush=True)
        exit_immediately(error.exit_code)
    except KeyboardInterrupt:
        if world.is_rank_zero:
            raise
        exit_immediately(130)  # 128 + SIGINT, as `main` returns on rank 0
    except LostPeerError as error:
        world.block_if_store_is_lost()  # then the launcher was lost, and its watch says so
        # A normal exit would close the process groups, and could wait forever for the lost rank.
        print(f"stretto: error: {error}", file=sys.stderr, flush=True)
        exit_immediately(error.exit_code)
    except StrettoError:  # `main` prints it
        raise
    except Exception:
        if world.is_single_rank:
            raise
        # A bug, maybe in a user's block. At a normal exit, torch aborts if a process group has pending operations.
        traceback.print_exc()
        exit_immediately(1)


@contextmanager
def _stop_watchdog_on_error(world: World) -> Iterator[None]:
    """Stop the watchdog after an error, so that this rank reports its own error and not that others end, too."""
    try:
        yield
    except BaseException as error:
        # After most errors, the others must notice that this rank is gone.
        ends_all_ranks = isinstance(error, SavedInterrupt) or (isinstance(error, StrettoError) and error.ends_all_ranks)
        world.stop_watchdog(says_goodbye=ends_all_ranks)
        raise
