"""The control plane: how often each rank calls the key-value store, up to 4,096 ranks on one machine.

python benchmarks/control.py [--quick]

Each rank is a thread with its own connections, and runs what a rank of a run does: it joins the others (`start`), saves
a step, which all ranks must have written before it counts (`step`), and leaves (`leave`). Then the ranks are started
again in the same store, as torchrun does, and a rank in a process of its own is killed: all others must name it
(`failure`). In a third launch, one rank is slow, and all others ask at the same time who is (`timeout`). The calls that
torch makes for its process groups are not counted.
"""

import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch

from stretto import CheckpointManager, World
from stretto.checkpoint.manifest import TrainingState
from stretto.checkpoint.snapshot import Snapshot
from stretto.launch.rank_environment import free_port
from stretto.mesh import rank_store, rank_tree
from stretto.mesh.c10d import PrefixStore, TCPStore
from stretto.mesh.file_limit import raise_file_limit
from stretto.mesh.launch_info import LaunchInfo
from stretto.mesh.liveness import WAITING, Liveness
from stretto.mesh.rank_store import RankStore
from stretto.mesh.rendezvous import delete_keys, leave, rendezvous
from stretto.mesh.signed_store import SignedStore
from timing import parse_quick, show

SIZES, QUICK_SIZES = (64, 512, 4096), (64, 512)
RANKS_PER_WORKER = 256
SLOW_PART = 3  # the rank at this part of the world is killed, or slow
LOCAL_PERIOD_SECONDS = 30.0
TIMEOUT = timedelta(seconds=300)
SECRET = b"the ranks of this benchmark"
STATE = TrainingState(step=1, seed=0, optimizer="SGD", epoch=0, pool=0, index=0, progress=0.0)


class CountingStore(SignedStore):
    """A store that counts its calls, those of its clones included."""

    def __init__(self, store: Any, scope: str = "", calls: Counter[str] | None = None) -> None:  # noqa: ANN401
        self.calls: Counter[str] = Counter() if calls is None else calls
        super().__init__(CountedCalls(store, self.calls), SECRET, scope)  # type: ignore[arg-type]
        self._torch_store = store

    def in_scope(self, name: str) -> "CountingStore":
        return CountingStore(PrefixStore(name, self._torch_store), f"{self._scope}/{name}", self.calls)

    def clone(self) -> "CountingStore":
        return CountingStore(self._torch_store.clone(), self._scope, self.calls)


@dataclass
class CountedCalls:
    """Passes all calls on to a torch store."""

    store: Any
    calls: Counter[str]

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        method = getattr(self.store, name)

        def call(*arguments: Any) -> Any:  # noqa: ANN401
            self.calls[name] += 1
            return method(*arguments)

        return call


class ThreadWorld(World):
    """A world whose ranks are threads, without torch's collectives."""

    def _sum(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        return tensor


@dataclass
class Rank:
    """One rank of the scripted launch, and the calls it has made."""

    number: int
    size: int
    port: int
    folder: str
    num_calls: dict[str, int] = field(default_factory=dict)  # by action
    error: str = ""
    num_messages: int = 0  # received from neighbors in the tree

    def start(self) -> None:
        info = LaunchInfo(self.number, self.size, self.number, self.size, "127.0.0.1", self.port, has_agent_store=True)
        store = TCPStore("127.0.0.1", self.port, is_master=False, timeout=TIMEOUT, wait_for_workers=False)
        self.run_store = CountingStore(store).in_scope("stretto/control")
        launch_id = rendezvous(self.run_store, self.number, self.size, TIMEOUT)
        own_store = self.run_store.in_scope(launch_id).clone()
        self.liveness = Liveness(own_store, info, TIMEOUT)
        assert self.liveness.tree.connect_error is None, self.liveness.tree.connect_error
        messages = RankStore(own_store.in_scope("messages"), TIMEOUT.total_seconds())
        self.world = ThreadWorld(
            self.number, self.size, torch.device("cpu"), self.liveness, messages, TIMEOUT, self.size
        )
        self.checkpoints = CheckpointManager(self.folder, self.world)
        self.checkpoints.start("never")  # without the collective that would tell the others of a checkpoint
        delete_keys(self.run_store, self.number, launch_id)
        self.liveness.tree.delete_keys()
        self.liveness.set_status(f"{WAITING} for all ranks in barrier")
        on_message = self.liveness.tree._on_message

        def count_message(text: str, source: int) -> None:
            self.num_messages += 1
            on_message(text, source)

        self.liveness.tree._on_message = count_message

    def step(self) -> None:
        self.checkpoints.save(Snapshot(STATE, []), wait=True)

    def leave(self) -> None:
        self.checkpoints.close()
        self.liveness.stop(says_goodbye=True)
        leave(self.run_store.in_scope("leave").unsigned, self.number, self.size)

    def failure(self) -> None:
        """Do what a rank does when a connection breaks; the error must name the killed rank."""
        self.error = str(self.world.transfer_error(self.number - 1, "sending"))

    def slow_down(self) -> None:
        """Do what the slow rank does, which is not to wait for others."""
        if self.number == self.size // SLOW_PART:
            self.liveness.set_status("reading data")

    def timeout(self) -> None:
        """Do what a rank does when others have not come for too long; the error must name the slow rank."""
        if self.number == self.size // SLOW_PART:
            time.sleep(1.0)
        else:
            failure = self.liveness.find_failure(asks=True)
            self.error = f"rank {failure.rank}" if failure is not None and failure.kind == "slow" else "nobody"

    def count(self, action: str) -> None:
        calls = self.run_store.calls if action != "start" else Counter[str]()
        before = sum(calls.values())
        getattr(self, action)()
        self.num_calls[action] = sum(self.run_store.calls.values()) - before


def work(pipe: Connection, numbers: range, size: int, port: int, folder: str) -> None:
    """Run some ranks, a thread each: an action whenever the parent says so."""
    torch.set_num_threads(1)
    threading.stack_size(1 << 20)
    # What a rank does by itself every second, without the store, would take all of the few cores of this machine.
    rank_tree._CONNECT_SECONDS = TIMEOUT.total_seconds()
    rank_tree._PERIOD_SECONDS = rank_store._WAIT_SECONDS = LOCAL_PERIOD_SECONDS
    sys.setswitchinterval(0.05)  # hundreds of threads share a process
    ranks = [Rank(number, size, port, folder) for number in numbers]
    with ThreadPoolExecutor(len(ranks)) as pool:
        while (action := pipe.recv()) is not None:
            list(pool.map(lambda rank: rank.count(action), ranks))
            pipe.send([(rank.number, rank.num_calls, rank.error, rank.num_messages) for rank in ranks])
    os._exit(0)  # threads of the trees may still wait


Result = tuple[int, dict[str, int], str, int]  # a rank, its calls by action, its error, and its received messages


class Launch:
    """All ranks of one launch, in a few processes; the rank that will be killed has its own."""

    def __init__(self, size: int, victim: int, port: int, folder: str) -> None:
        context = multiprocessing.get_context("fork")
        parts = [range(victim), range(victim + 1, size), range(victim, victim + 1)]
        ranges = [part[i : i + RANKS_PER_WORKER] for part in parts for i in range(0, len(part), RANKS_PER_WORKER)]
        self.pipes, self.processes = [], []
        for numbers in ranges:
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(theirs, numbers, size, port, folder), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def do(self, action: str) -> list[Result]:
        """Let all ranks do something at the same time; return what they have counted."""
        for pipe in self.pipes:
            pipe.send(action)
        return [result for pipe in self.pipes for result in pipe.recv()]

    def kill_victim(self) -> None:
        os.kill(self.processes.pop().pid or 0, signal.SIGKILL)
        self.pipes.pop()

    def end(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.send(None)
            process.join()


def measure(size: int, results: "multiprocessing.SimpleQueue[dict[str, float]]") -> None:
    """Start ranks, let them save and leave; start them again and kill one. In a process of its own, to fork early."""
    raise_file_limit()
    started = time.perf_counter()
    victim = size // SLOW_PART
    port = free_port()  # chosen now, because the ranks are forked before the store starts its threads
    figures: dict[str, float] = {}
    num_calls: Counter[str] = Counter()
    worst: Counter[str] = Counter()

    def run(launch: Launch, action: str) -> list[Result]:
        began = time.perf_counter()
        counts = launch.do(action)
        figures[f"{action}_seconds"] = time.perf_counter() - began
        calls = [calls[action] for _, calls, _, _ in counts]
        num_calls[action], worst[action] = sum(calls), max(calls)
        return counts

    with tempfile.TemporaryDirectory() as folder:
        launches = [Launch(size, victim, port, folder) for _ in range(3)]
        listener = socket.create_server(("127.0.0.1", port), backlog=size)
        store = TCPStore(
            "127.0.0.1", port, is_master=True, timeout=TIMEOUT, wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )  # fmt: skip
        for action in ("start", "step", "leave"):
            run(launches[0], action)
            figures["keys_left"] = max(figures.get("keys_left", 0.0), store.num_keys() / size)
        launches[0].end()
        run(launches[1], "start")
        launches[1].kill_victim()
        counts = run(launches[1], "failure")
        figures["keys_left"] = max(figures["keys_left"], store.num_keys() / size)
        num_right = sum(f"rank {number} lost rank {victim} " in error for number, _, error, _ in counts)
        launches[1].end()
        launches[2].do("start")
        launches[2].do("slow_down")
        counts = run(launches[2], "timeout")
        num_right += sum(error == f"rank {victim}" for _, _, error, _ in counts)
        figures["messages"] = sum(num_messages for _, _, _, num_messages in counts) / size
        figures["named_right"] = float(num_right == 2 * (size - 1))
        launches[2].end()
    figures["calls"] = sum(num_calls.values()) / size
    figures["worst"] = sum(worst.values())
    figures |= {f"{action}_calls": count / size for action, count in num_calls.items()}
    figures["seconds"] = time.perf_counter() - started
    results.put(figures)


def main() -> None:
    sizes = QUICK_SIZES if parse_quick(__doc__ or "") else SIZES
    os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"
    # torch looks up the name of each connection's address, which takes seconds without a name server.
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
    figures: dict[int, dict[str, float]] = {}
    for size in sizes:
        context = multiprocessing.get_context("spawn")
        results = context.SimpleQueue()
        process = context.Process(target=measure, args=(size, results))
        process.start()
        process.join()
        assert process.exitcode == 0, f"the launch of {size} ranks failed"
        figures[size] = results.get()
    actions = ("start", "step", "leave", "failure", "timeout")
    show(
        "Calls of the key-value store per rank, and seconds until all ranks were done",
        ["ranks", *(f"{action}" for action in actions), "most on one rank", *(f"{action} s" for action in actions)],
        [
            [
                str(size),
                *(f"{values[f'{action}_calls']:.1f}" for action in actions),
                f"{values['worst']:.0f}",
                *(f"{values[f'{action}_seconds']:.1f}" for action in actions),
            ]
            for size, values in figures.items()
        ],
        {
            **{f"calls_per_rank_{size}": values["calls"] for size, values in figures.items()},
            **{f"most_calls_{size}": values["worst"] for size, values in figures.items()},
            "messages_per_rank": max(values["messages"] for values in figures.values()),
            "keys_left_per_rank": max(values["keys_left"] for values in figures.values()),
            "named_right": int(all(values["named_right"] for values in figures.values())),
            "seconds": sum(values["seconds"] for values in figures.values()),
        },
    )


if __name__ == "__main__":
    main()
