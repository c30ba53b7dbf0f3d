"""LiveRanks: processes that train together with a LiveTrainer, of which some are killed and others started."""

import ctypes
import json
import os
import secrets
import signal
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self

import torch

from stretto import Layout
from stretto.launch.rank_environment import free_port
from stretto.mesh.c10d import TCPStore
from stretto.train.live_trainer import LiveTrainer

_NEW_HOST_NAME = 0x04000000  # CLONE_NEWUTS
_IMPORTED = ["torch._dynamo", "stretto.planning.choose", "stretto.train.run", "stretto.train.live_trainer"]


class LiveRanks:
    """Starts a process per slot; each sends a line for every step that it takes: `step`, `loss`, `replicas`.

    The parent hosts the store, as an elastic agent does. With `nodes`, each rank sees one of these as its host name,
    which only root can set. After each step, a rank waits for `step_seconds`; and while replicas are lost, so long that
    others can take their place, unless none `waits_for_others`.
    """

    def __init__(
        self,
        layout: Layout,
        make_trainer: Callable[..., Any],
        *arguments: Any,  # noqa: ANN401
        timeout: float = 20.0,
        copy_every: int = 0,
        has_hosts: bool = False,
        checkpoints: Path | None = None,
        save_every: int = 4,
        nodes: Sequence[str] = (),
        step_seconds: float = 0.0,
        waits_for_others: bool = True,
    ) -> None:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        self.layout, self._make_trainer, self._arguments, self._timeout = layout, make_trainer, arguments, timeout
        self._options = {"copy_every": copy_every, "checkpoints": checkpoints, "save_every": save_every}
        self._nodes, self._step_seconds, self._waits_for_others = nodes, step_seconds, waits_for_others
        self._port = free_port()
        self._store = TCPStore("127.0.0.1", self._port, is_master=True, wait_for_workers=False)
        self._secret = secrets.token_hex(16)
        # With a launcher per replica, the ranks host the store.
        ports = [free_port() for _ in range(layout.replicas)] if has_hosts else []
        self._hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(_IMPORTED)
        self.processes: dict[int, BaseProcess] = {}
        self._pipes: dict[int, Connection] = {}
        self.lines: list[dict[str, Any]] = []  # of all processes

    def __enter__(self) -> Self:
        for slot in range(self.layout.num_ranks):
            self.start(slot)
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes.values():
            process.kill()
            process.join()

    def start(self, slot: int) -> None:
        """Start the process of a slot."""
        ours, theirs = self._context.Pipe()
        size = self.layout.num_ranks
        environment = {
            **os.environ,
            "RANK": str(slot), "WORLD_SIZE": str(size), "LOCAL_RANK": str(slot), "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._port), "STRETTO_SECRET": self._secret,
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"), "TORCHELASTIC_USE_AGENT_STORE": "True",
        }  # fmt: skip
        if self._hosts:
            column = size // self.layout.replicas
            environment |= {
                "RANK": str(slot % column), "WORLD_SIZE": str(column), "LOCAL_RANK": str(slot % column),
                "LOCAL_WORLD_SIZE": str(column), "STRETTO_HOSTS": self._hosts, "STRETTO_REPLICA": str(slot // column),
            }  # fmt: skip
        if self._nodes:
            local = [other for other, node in enumerate(self._nodes) if node == self._nodes[slot]]
            environment |= {"LOCAL_RANK": str(local.index(slot)), "LOCAL_WORLD_SIZE": str(len(local))}
        outputs = [Connection(os.dup(number), readable=False) for number in (1, 2)]
        settings = (
            self.layout,
            self._make_trainer,
            self._arguments,
            self._timeout,
            self._step_seconds,
            self._waits_for_others,
            self._options,
        )
        node = self._nodes[slot] if self._nodes else None
        arguments = (environment, node, outputs, theirs, *settings)
        self.processes[slot] = self._context.Process(target=_train, args=arguments, daemon=True)
        self.processes[slot].start()
        self._pipes[slot] = ours
        theirs.close()
        for output in outputs:
            output.close()

    def kill(self, slot: int) -> None:
        """Kill the process of a slot, as `kill -9` does."""
        self.processes[slot].kill()
        self.processes[slot].join()

    def signal(self, slot: int, number: signal.Signals) -> None:
        """Send a signal to the process of a slot."""
        os.kill(self.processes[slot].pid or 0, number)

    def read(self) -> None:
        """Read the lines that have been sent."""
        for slot, pipe in list(self._pipes.items()):
            with suppress(EOFError, OSError):
                while pipe.poll():
                    self.lines.append({"slot": slot, **json.loads(pipe.recv_bytes())})

    def wait_for(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        """Read lines until a condition holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            errors = [line["error"] for line in self.lines if "error" in line]
            assert not errors, "\n".join(errors)
            assert time.monotonic() < deadline, f"not within {seconds} s; the last lines: {self.lines[-6:]}"
            time.sleep(0.01)
            self.read()

    def wait_for_step(self, step: int, seconds: float = 60.0) -> None:
        """Read lines until some process has finished a step."""
        self.wait_for(lambda: any(line.get("step", 0) >= step for line in self.lines), seconds)

    def wait_for_process(self, slot: int) -> None:
        """Read lines until the present process of a slot has finished a step."""
        pid = self.processes[slot].pid
        self.wait_for(lambda: any(line.get("pid") == pid for line in self.lines))

    def wait_until_done(self, seconds: float = 60.0) -> None:
        """Read lines until all processes that were not killed have finished."""

        def are_done() -> bool:
            alive = {slot for slot, process in self.processes.items() if process.exitcode is None}
            return alive <= {line["slot"] for line in self.lines if line.get("done")}

        self.wait_for(are_done, seconds)

    def losses(self, slot: int) -> dict[int, float]:
        """Return the losses that the processes of a slot have reported, by step."""
        return {line["step"]: line["loss"] for line in self.lines if line["slot"] == slot and "step" in line}


def _train(
    environment: dict[str, str],
    node: str | None,
    outputs: list[Connection],
    pipe: Connection,
    layout: Layout,
    make_trainer: Callable[..., Any],
    arguments: tuple[Any, ...],
    timeout: float,
    step_seconds: float,
    waits_for_others: bool,
    options: dict[str, Any],
) -> None:
    os.environ.clear()
    os.environ |= environment
    if node is not None:
        assert not ctypes.CDLL(None).unshare(_NEW_HOST_NAME), "only root can set a host name"
        socket.sethostname(node)
    for number, output in enumerate(outputs, start=1):
        os.dup2(output.fileno(), number)
        output.close()
    torch.set_num_threads(1)

    def send(line: dict[str, Any]) -> None:
        pipe.send_bytes(json.dumps(line).encode())

    try:
        live = LiveTrainer(
            lambda world, layout: make_trainer(world, layout, *arguments),
            layout, device="cpu", timeout=timedelta(seconds=timeout), **options,
        )  # fmt: skip
        with live as trainer:
            for report in trainer:
                send(
                    {
                        "step": report.step,
                        "loss": report.loss,
                        "replicas": trainer.num_replicas,
                        "pid": os.getpid(),
                        "time": time.monotonic(),
                    }
                )
                time.sleep(step_seconds)
                if waits_for_others and trainer.num_replicas < layout.replicas:
                    # On a busy machine, a new process takes seconds to join; the run must not end before.
                    time.sleep(0.02 if report.step < 40 else 0.7)
            weights = [float(value.detach().double().sum()) for value in trainer.trainer.engine.stack.parameters()]
        send({"done": True, "weights": weights})
    except Exception:  # noqa: BLE001
        send({"error": traceback.format_exc()})
    pipe.recv_bytes()  # until the test ends
