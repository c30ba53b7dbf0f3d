"""Ranks for tests: real processes on gloo, one thread each, kept between calls, with a hard time limit.

Ranks are forked from a process that has imported torch and stretto and done nothing else: the suite starts hundreds of
ranks, and the import takes three seconds of a core.
"""

import atexit
import faulthandler
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from helpers.strict_batches import use_strict_batches
from stretto.base.errors import StrettoError
from stretto.launch.rank_environment import free_port
from stretto.mesh.join import BACKEND_VARIABLE, world
from stretto.mesh.secret import SECRET_VARIABLE, new_secret
from stretto.mesh.strict import STRICT
from stretto.mesh.world import TIMEOUT, World

# Making an optimizer imports `torch._dynamo`, which takes another two seconds.
_IMPORTED = ["torch._dynamo", "stretto.planning.choose", "stretto.train.run"]

_MAX_CALLS = 10

# A string, since this is imported before `-m strict` is read.
NEEDS_GLOO = pytest.mark.skipif(
    f"os.environ.get({BACKEND_VARIABLE!r}) == {STRICT!r}",
    reason="the strict backend has no device mesh and no timeouts",
)


class RanksFailedError(AssertionError):
    """The errors of the ranks that failed, by rank."""

    def __init__(self, errors: dict[int, str]) -> None:
        super().__init__("\n".join(f"rank {rank}: {text}" for rank, text in errors.items()))
        self.errors = errors


class RankPool:
    """A world of processes that call functions `(world, *arguments)`."""

    def __init__(self, size: int, timeout: timedelta = TIMEOUT) -> None:
        # Ranks that their parent kills lose the store, and torch would log much about that.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        context = get_context("forkserver")
        context.set_forkserver_preload(_IMPORTED)
        port = free_port()
        self.pipes: list[Connection] = []
        self.processes = []
        outputs = [Connection(os.dup(number), readable=False) for number in (1, 2)]
        environment = {SECRET_VARIABLE: new_secret(), **os.environ}
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (rank, size, port, theirs, timeout)
            process = context.Process(target=_serve_as_child, args=(environment, outputs, arguments), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        for output in outputs:
            output.close()
        self._is_started = False
        self.num_calls = 0
        # At exit, multiprocessing would wait for ranks that are paused.
        atexit.register(self.close)

    def _wait_until_started(self) -> None:
        """The time limit of a call must not include the start of the ranks, which is slow on a busy machine."""
        if not self._is_started:
            for pipe in self.pipes:
                assert pipe.poll(120), "a rank did not start"
                pipe.recv_bytes()
            self._is_started = True

    def run(self, function: Callable[..., Any], *arguments: Any, seconds: float = 120) -> list[Any]:  # noqa: ANN401
        """Call a function on every rank and return the results; if one fails, end all and raise their errors."""
        if self.are_alive:
            self.signal(signal.SIGCONT)  # after `pause`
        self._wait_until_started()
        self.num_calls += 1
        for pipe in self.pipes:
            pipe.send_bytes(pickle.dumps((function, arguments)))
        until = time.monotonic() + seconds
        done: dict[int, Any] = {}
        failed: dict[int, str] = {}
        for rank, pipe in enumerate(self.pipes):
            try:
                if not pipe.poll(max(0.0, until - time.monotonic())):
                    failed[rank] = f"no answer within {seconds} s; its stacks are in the captured output"
                    os.kill(self.processes[rank].pid or 0, signal.SIGUSR1)
                    time.sleep(0.5)  # until the stacks are written
                    continue
                is_done, value = pickle.loads(pipe.recv_bytes())  # noqa: S301 - our own process
                (done if is_done else failed)[rank] = value
            except (EOFError, ConnectionError):
                self.processes[rank].join(5)
                failed[rank] = f"ended with code {self.processes[rank].exitcode}"
            if failed:
                # The others may wait for this one; give them a little time to report it.
                until = min(until, time.monotonic() + 10)
        if failed:
            self.close()
            raise RanksFailedError(failed)
        return [done[rank] for rank in range(len(self.pipes))]

    @property
    def are_alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def pause(self) -> None:
        """Stop all ranks until the next call.

        gloo has a thread for each group, which wakes up 100 times a second, also in a rank that waits.
        """
        if self.are_alive:
            self.signal(signal.SIGSTOP)

    def signal(self, number: signal.Signals) -> None:
        for process in self.processes:
            os.kill(process.pid or 0, number)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        atexit.unregister(self.close)


class RankPools:
    """Pools of any size, started on first use; restarted after a failure, and after some calls.

    Tests create groups in most calls: after 30 calls, an idle rank takes a tenth of a core. So a pool is paused while
    others are used, and restarted after some calls, which takes 0.3 s.
    """

    def __init__(self, max_calls: int = _MAX_CALLS) -> None:
        self._max_calls = max_calls
        self._started: dict[int, RankPool] = {}

    def __getitem__(self, size: int) -> RankPool:
        ranks = self._started.get(size)
        if ranks is None or not ranks.are_alive or ranks.num_calls >= self._max_calls:
            if ranks is not None:
                ranks.close()
            self._started[size] = ranks = RankPool(size)
        for pool in self._started.values():
            if pool is not ranks:
                pool.pause()
        return ranks

    def close(self) -> None:
        for ranks in self._started.values():
            ranks.close()


def _serve_as_child(environment: dict[str, str], outputs: list[Connection], arguments: tuple[Any, ...]) -> None:
    """Serve with the environment and the output of this test, not those of the fork server's start."""
    os.environ.clear()
    os.environ |= environment
    faulthandler.register(signal.SIGUSR1)
    for number, output in enumerate(outputs, start=1):
        os.dup2(output.fileno(), number)
        output.close()
    _serve(*arguments)


def _serve(rank: int, size: int, port: int, pipe: Connection, timeout: timedelta) -> None:
    torch.set_num_threads(1)
    if size > 1:
        os.environ |= {
            "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
    if os.environ.get(BACKEND_VARIABLE) == STRICT:
        use_strict_batches()
    with world(size, device="cpu", timeout=timeout) as joined:
        pipe.send_bytes(b"started")
        while True:
            function, arguments = pickle.loads(pipe.recv_bytes())  # noqa: S301 - our own parent
            # By value: torch would share the tensors' memory, which ends with the sender.
            is_done, value = _answer(function, joined, arguments)
            pipe.send_bytes(pickle.dumps((is_done, value)))
            if not is_done:
                # Like the command: a rank that fails exits, so that ranks that wait for it see its connections close.
                os._exit(1)


def _answer(function: Callable[..., Any], joined: World, arguments: tuple[Any, ...]) -> tuple[bool, Any]:
    try:
        return True, function(joined, *arguments)
    except StrettoError as error:
        return False, str(error)
    except Exception:  # noqa: BLE001
        return False, traceback.format_exc()
