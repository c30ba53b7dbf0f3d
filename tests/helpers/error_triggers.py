"""Triggers of the errors in docs/reference/errors.md that no command line raises, in a prepared folder."""

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from threading import Thread
from unittest.mock import patch

import torch
from torch import Tensor, nn

from helpers.rank_pool import RankPool, RanksFailedError
from stretto import (
    CheckpointManager,
    Layout,
    Run,
    World,
    load_config,
    load_model,
    make_engine,
    world,
)
from stretto.blocks.block import Block
from stretto.checkpoint import Snapshot, find_checkpoint
from stretto.checkpoint.manifest import TrainingState
from stretto.checkpoint.shards import TensorShard
from stretto.data import (
    Corpus,
    Lanes,
    SequenceOptions,
    SeriesOptions,
    TextOptions,
    prepare_sequences,
    prepare_series,
    prepare_text,
)
from stretto.errors import LostPeerError
from stretto.exchange import from_torch
from stretto.mesh import secret
from stretto.mesh.c10d import HashStore, Store
from stretto.mesh.device import find_device
from stretto.mesh.rank_store import RankStore
from stretto.mesh.rendezvous import rendezvous
from stretto.mesh.signed_store import SignedStore
from stretto.nn import Linear, LossSum, SquaredError, Stack, State, initialize
from stretto.serve import write_predictions
from stretto.train import Request

# Files that can't be read as what their names say.
MALFORMED_FILES = {
    "line.txt": "one line\n",
    "torn.jsonl": '{"text": "la"\n',
    "ragged.jsonl": '{"values": [[1, 2], [3]]}\n',
    "negative.jsonl": '{"tokens": [1, -2]}\n',
    "twice.csv": "load,load\n1,2\n",
    "header.csv": "hour,load\n",
    "quote.csv": 'hour,load\n0,"1\n',
    "infinite.csv": "hour,load\n0,1\n1,inf\n",
    "mixed.csv": "meter,load\na,1\nb,2\na,3\n",
    "back.csv": "hour,load\n2,1\n1,1\n",
    "names.csv": "name\nx\ny\n",
    "far.csv": "load\n1000000000000\n1000000000001\n",
}


def make_workspace(folder: Path) -> None:
    """Fill a folder with what the triggers need: files, prepared data, a finished run."""
    here = Path.cwd()
    os.chdir(folder)
    try:
        Path("book.txt").write_text("the theme enters before the answer has ended\n" * 60)
        rows = [{"text": "la " * (1 + row % 7), "mood": "calm" if row % 2 else "bright"} for row in range(60)]
        Path("songs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        Path("meters.csv").write_text("hour,load\n" + "".join(f"{hour},{hour % 24}\n" for hour in range(300)))
        Path("empty.txt").write_text("")
        Path("latin.txt").write_bytes("Gr\xfc\xdfe\n".encode("latin-1"))
        Path("broken.csv").write_text("hour,load\n0,1\n1,high\n")
        Path("short.jsonl").write_text('{"text": "la"}\n{"words": "la"}\n')
        Path("models.py").write_text(_MODELS)
        for name, text in MALFORMED_FILES.items():
            Path(name).write_text(text)
        Path("stuff").mkdir()
        Path("stuff", "songs.txt").write_text("la")
        prepare_text("book.txt", "data", TextOptions(validation_fraction=0.2))
        prepare_text("book.txt", "words", TextOptions(level="word"))
        prepare_sequences("songs.jsonl", "songs", SequenceOptions(label="mood"))
        prepare_sequences("songs.jsonl", "plain")
        prepare_series("meters.csv", "meters", SeriesOptions(columns=["load"]))
        Path("run.toml").write_text(_RUN)
        Path("songs.toml").write_text('[data]\ntrain = "songs"\n')
        Path("meters.toml").write_text('[data]\ntrain = "meters"\ncontext = 48\n')
        for _ in Run(load_config("run.toml", {"run.folder": "runs/done"})).events():
            pass
        Path("alone.toml").write_text(_RUN.replace('valid = "data/valid"\n', ""))
        for _ in Run(load_config("alone.toml", {"run.folder": "runs/alone"})).events():
            pass
    finally:
        os.chdir(here)


_MODELS = """
import os, torch, stretto

def two_sided(task):
    nn = stretto.nn
    return nn.Stack([nn.Embedding(256, 4), nn.BidirectionalLSTM(4, 4), nn.Linear(8, 256)])

def not_a_stack(task):
    return torch.nn.Linear(4, 4)

def fails(task):
    return task.nothing

def mean(y, targets):
    return y.mean()

def kills(y, targets):
    if y.requires_grad:
        os.kill(os.getpid(), 9)
    return stretto.nn.LossSum(y.sum(), (targets == targets).sum())

class Hides(stretto.nn.Block):
    def __init__(self):
        super().__init__()
        self.last = 0

    def forward(self, x, state):
        y = x + self.last
        self.last = x[-1].detach().mean()
        return y, state

def hides(task):
    return stretto.nn.Stack([stretto.nn.Embedding(256, 4), Hides(), stretto.nn.Linear(4, 256)])

def narrow(task):
    return stretto.nn.Stack([stretto.nn.Embedding(256, 4), stretto.nn.Linear(4, 25)])

def few(task):
    return stretto.nn.Stack([stretto.nn.Embedding(25, 4), stretto.nn.Linear(4, 256)])

number = 3

def own(task):
    return stretto.nn.Stack([stretto.nn.Embedding(256, 4), stretto.nn.Linear(4, 256)])
"""
_RUN = """
[data]
train = "data/train"
valid = "data/valid"
lanes = 4
window = 10
[model]
hidden = 8
[train]
steps = 3
[run]
folder = "runs/one"
"""


class HiddenStateBlock(Block):
    """Keeps what should be a state in the module."""

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.zeros(())

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        y = x + self.last
        self.last = x[-1].mean().detach()
        return y, state


class WithoutReset(nn.Module):
    """Weights, and no way to draw them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def write(path: str, text: str) -> None:
    Path(path).write_text(text)


def train(**overrides: str) -> list[object]:
    config = load_config("run.toml", {name.replace("__", "."): value for name, value in overrides.items()})
    return list(Run(config).events())


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def newest() -> Path:
    return max(Path("runs/done/checkpoints").glob("step-*"))


def spoil_shard() -> None:
    flip(next(Path("data/train").glob("*.bin")))
    train()


def spoil_checkpoint() -> None:
    flip(next(newest().glob("*.safetensors")))
    train(run__folder="runs/done", train__steps="5", train__schedule="constant")


def two_configs() -> None:
    write("run.toml", _RUN + "[layout]\nauto = true\nchunks = 2\n")
    load_config("run.toml")


def no_toml() -> None:
    write("run.toml", "[data\n")
    load_config("run.toml")


def no_data() -> None:
    write("run.toml", "[data]\nlanes = 3\n")
    load_config("run.toml")


def no_data_section() -> None:
    write("run.toml", "[train]\nsteps = 3\n")
    load_config("run.toml")


def no_section() -> None:
    write("run.toml", "lanes = 8\n" + _RUN)
    load_config("run.toml")


def auto_layout_in_a_section() -> None:
    write("run.toml", _RUN + 'layout = "auto"\n')
    load_config("run.toml")


def section_as_value() -> None:
    write("run.toml", 'data = "data/train"\n')
    load_config("run.toml")


def lock() -> None:
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(CheckpointManager(Path("runs/two"))).start()


def fence() -> None:
    checkpoints = CheckpointManager(Path("runs/two"))
    with checkpoints:
        checkpoints.start()
        claim = next(Path("runs/two/generations").glob("*.json"))
        shutil.copy(claim, claim.with_name("000000002.json"))
        checkpoints.check_fence()


def save_nan() -> None:
    with CheckpointManager(Path("runs/two")) as checkpoints:
        checkpoints.start()
        training_state = TrainingState(step=1, seed=1, optimizer="sgd", epoch=0, pool=0, index=1, progress=0.5)
        checkpoints.save(Snapshot(training_state, [TensorShard("weights.w", torch.full((2,), torch.nan))]), wait=True)


def save_first() -> None:
    with CheckpointManager(Path("runs/two")) as checkpoints:
        checkpoints.save(
            Snapshot(TrainingState(step=1, seed=1, optimizer="sgd", epoch=0, pool=0, index=1, progress=0.5), [])
        )


def preempt() -> None:
    run = Run(load_config("run.toml"))
    for _ in run.events():
        run.trainer.request(Request.STOP)


def load_untrusted() -> None:
    train(run__folder="runs/own", model__factory="models.py:own")
    load_model("runs/own")


def load_from_elsewhere() -> None:
    train(run__folder="runs/far", save__to="elsewhere")
    Path("runs/far/weights.safetensors").unlink()
    load_model("runs/far")


def oversize() -> None:
    os.truncate(newest() / "manifest.json", 1 << 30)
    find_checkpoint("runs/done")


def pipe_index() -> None:
    Path("data/train/index.json").unlink()
    os.mkfifo("data/train/index.json")
    Corpus.open("data/train")


def long_line() -> None:
    with Path("long.csv").open("wb") as file:
        file.write(b"hour,load\n0,1\n1,")
        file.seek(1 << 28)
        file.write(b"\n")
    prepare_series("long.csv", "new")


def import_bomb() -> None:
    torch.save({"weight": torch.zeros(1).expand(1 << 20, 1 << 20)}, "bomb.pt")
    from_torch("bomb.pt")


def spoil_weights() -> None:
    Path("runs/done/weights.safetensors").write_bytes(b"no tensors")
    load_model("runs/done")


def environment() -> None:
    os.environ["RANK"] = "0"
    try:
        with world():
            pass
    finally:
        del os.environ["RANK"]


def start_world(size: int, device: str = "auto") -> None:
    with world(size, device=device):
        pass


def find_secret(text: str) -> None:
    secret.find_secret({secret.SECRET_VARIABLE: text}, None, 0, timedelta(seconds=0.1))


def open_secret() -> None:
    secret.find_secret({}, Path("runs"), 0, timedelta(seconds=0.1))
    Path("runs/secret").chmod(0o644)
    secret.find_secret({}, Path("runs"), 1, timedelta(seconds=0.1))


def missing_secret() -> None:
    secret.find_secret({}, Path("runs"), 1, timedelta(seconds=0.1))


def different_secrets() -> None:
    store = SignedStore(HashStore(), b"first")
    Thread(target=_welcome, args=(store.unsigned,), daemon=True).start()
    rendezvous(store, 1, 2, timedelta(seconds=10))


def _welcome(store: Store) -> None:
    """Be a rank 0 that has no secret."""
    store.wait(["hello/1"])
    store.set(f"welcome/1/{store.get('hello/1').decode()}", 32 * "1")


def forged_message() -> None:
    store = HashStore()
    store.set("key", "forged")
    RankStore(SignedStore(store, b"secret")).wait_for_message("key", 0, timedelta(seconds=1), lambda: None)


def wait_for_message() -> None:
    RankStore(SignedStore(HashStore())).wait_for_message("key", 1, timedelta(seconds=0.1), lambda: None)


def killed() -> None:
    """Let one of two ranks be killed, as the system does to one that asks for too much memory."""
    options = ["--layout.stages", "2", "--run.max_restarts", "0", "--model.loss", "models.py:kills"]
    command = [sys.executable, "-m", "stretto", "train", "run.toml", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == LostPeerError.exit_code
    raise LostPeerError(done.stderr.strip().splitlines()[-1].removeprefix("stretto: error: "))


def tensor_loss(y: Tensor, targets: Tensor) -> Tensor:
    """Returns a mean, as most losses outside do."""
    return (y - targets).square().mean()


def mean_loss(y: Tensor, targets: Tensor) -> LossSum:
    """Says a mean where a sum is asked for."""
    return LossSum((y - targets).mean() + 1, torch.tensor(1))


def two_ranks_on_one_device() -> None:
    with patch.multiple(
        torch.accelerator, current_accelerator=lambda **_: torch.device("cuda"), device_count=lambda: 2
    ):
        find_device("cuda:1", local_rank=0, local_size=2)


def tied() -> None:
    first, second = Linear(3, 3), Linear(3, 3)
    second.module.weight = first.module.weight
    initialize(Stack([first, second])[1:], seed=1)


def share_twice() -> None:
    Lanes(Corpus.open("data/train"), 4, 10).share(0, 2).share(0, 2)


def die_or_wait(world: World) -> None:
    engine = make_engine(Stack([Linear(2, 2)]), SquaredError(), Layout(replicas=2), world, seed=1)
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    engine.mesh.world.all_reduce([1.0])


def lost_peer() -> None:
    try:
        RankPool(2).run(die_or_wait, seconds=60)
    except RanksFailedError as failed:
        raise LostPeerError(failed.errors[0]) from None
    raise AssertionError("the other rank was not missed")


def predict_through_link() -> None:
    Path("new.jsonl.parts").symlink_to("runs")
    write_predictions(load_model("runs/done"), "data/valid", "new.jsonl")


def predict_beside_another() -> None:
    trained = load_model("runs/done")
    Path("new.jsonl.parts").mkdir()
    Path("new.jsonl.parts", "fingerprint").write_text("of another model")
    write_predictions(trained, "data/valid", "new.jsonl")
