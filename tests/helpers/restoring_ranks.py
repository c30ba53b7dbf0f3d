"""What ranks do to save a checkpoint and to restore it, and the digests of what they then hold."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from helpers.layout_cases import NUM_TOKENS, Case, RandomWindows
from stretto import CheckpointManager, Layout, TrainConfig, Trainer, World, make_engine
from stretto.base.task import Task
from stretto.checkpoint.manifest import Manifest
from stretto.errors import DataError
from stretto.nn import LSTM, Block, CrossEntropy, Embedding, Linear, MinGRU, Stack

REPLICAS, GRID, STAGES = Layout(replicas=4), Layout(replicas=2, stages=2), Layout(stages=4)  # of 4 ranks
MAX_READ = 1.05  # bytes that all ranks together read, over the bytes of the checkpoint
HeldRows = dict[str, tuple[int, list[str]]]  # by tensor: the index of the first row, and the digest of each row


@dataclass(frozen=True)
class SavedModel:
    """A model of 4.4 MB, so 13 MB with the state of its optimizer: enough for all ranks to have a share."""

    num_tokens: int = NUM_TOKENS  # if there are more, the output layer uses the weight of the embedding
    num_lanes: int = 8  # of 5 KB each
    weight_seed: int = 3
    optimizer: str = "adamw"  # "sgd" has no state, so the weights are all that is cut
    has_spans: bool = False  # then it has other blocks, of 3 MB, and no lanes


PLAIN_MODEL = SavedModel()


def make_trainer(world: World, layout: Layout, model: SavedModel) -> Trainer:
    embedding, head = Embedding(model.num_tokens, 192), Linear(192, model.num_tokens)
    if model.num_tokens > NUM_TOKENS:
        head.module.weight = embedding.module.weight
    hidden: list[Block] = [LSTM(192, 192), LSTM(192, 256), LSTM(256, 192)]
    if model.has_spans:
        hidden = [MinGRU(192, 512), MinGRU(512, 192), MinGRU(192, 512), MinGRU(512, 192)]
    engine = make_engine(Stack([embedding, *hidden, head]), CrossEntropy(), layout, world, seed=model.weight_seed)
    case = Case(num_rows=model.num_lanes, window=4, model="noncausal" if model.has_spans else "lstm")
    windows = RandomWindows(case, task=Task.language(model.num_tokens))
    return Trainer(engine, windows, TrainConfig(steps=9, lr=0.01, optimizer=model.optimizer), seed=1)


def save(world: World, location: Path | str, layout: Layout, model: SavedModel = PLAIN_MODEL) -> int:
    """Train and save; return how many bytes of tensors this rank has written."""
    trainer = make_trainer(world, layout, model)
    with CheckpointManager(location, world) as checkpoints:
        checkpoints.start()
        trainer.advance()
        snapshot = trainer.snapshot()
        checkpoints.save(snapshot, wait=True)
    return sum(shard.tensor.nbytes for shard in snapshot.shards)


def restore(world: World, location: Path | str, layout: Layout, model: SavedModel = PLAIN_MODEL) -> HeldRows:
    """Restore, and return all that this rank holds."""
    trainer = make_trainer(world, layout, model)
    with CheckpointManager(location, world) as checkpoints:
        checkpoint = checkpoints.start()
        assert checkpoint is not None
        trainer.restore(checkpoint)
    return held_rows(trainer)


def held_rows(trainer: Trainer) -> HeldRows:
    stack, state = trainer.engine.stack, trainer.state
    assert (state is not None) == trainer.windows.is_stateful
    held = {f"weights.{name}": (0, tensor) for name, tensor in stack.named_tensors().items()}
    for name, weight in stack.named_weights().items():
        for key, value in trainer.optimizer.state[weight].items():
            held[f"optimizer.{name}.{key}"] = (0, value)
    for block, tensors in zip(stack.indices, stack.split_state(state), strict=True) if state is not None else ():
        for number, tensor in enumerate(tensors):
            held[f"lanes.{block}.{number}"] = (trainer.windows.lane_indices.start, tensor)
    return {name: (first, digests(tensor)) for name, (first, tensor) in held.items()}


def restore_or_fail(world: World, location: Path | str, layout: Layout) -> str:
    """Return the error of a restore."""
    try:
        restore(world, location, layout)
    except DataError as error:
        world.barrier()  # no rank is left behind in a collective
        return str(error)
    return ""


def digests(tensor: Tensor) -> list[str]:
    rows = tensor.detach() if tensor.dim() else tensor.detach().unsqueeze(0)
    return [hashlib.sha256(row.contiguous().numpy().tobytes()).hexdigest() for row in rows]


def check_restored(held: list[HeldRows], folder: Path, manifest: Manifest) -> None:
    """Each rank has the bits in the checkpoint's files, as the library safetensors reads them; together, all."""
    saved: dict[str, dict[int, str]] = {}
    for file in manifest.files:
        tensors = load_file(folder / file.name) if file.groups else {}
        for shard in manifest.shards(file, ""):
            saved.setdefault(shard.name, {}).update(zip(shard.rows, digests(tensors[shard.name]), strict=True))
    for of_rank in held:
        for name, (first, actual) in of_rank.items():
            assert actual == [saved[name][row] for row in range(first, first + len(actual))], name
    assert {name for of_rank in held for name in of_rank} == {*saved}
