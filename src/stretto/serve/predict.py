"""Predict: each row of some data once, in order, on any number of ranks, and again from where it was cut off.

rows     |---- part 0 ----|---- part 1 ----|---- part 2 ----|- 3 -|     cut by the data alone, never by the ranks
ranks         rank 0           rank 1           rank 0       rank 1     so that the answers are the same bits
files    PATH.parts/00000000.jsonl ...   ->   PATH, when all are there
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from stretto.base.disk import write_whole
from stretto.base.errors import ConfigError
from stretto.base.window import Rows
from stretto.data.index import Store
from stretto.mesh.mesh import Mesh
from stretto.mesh.topology import Topology
from stretto.mesh.world import World
from stretto.serve.answers import Answer, Asked, Outputs, ask
from stretto.serve.source import is_raw, open_source, prepare_source, prepared
from stretto.train.trained import TrainedModel

# Steps of a part, of a batch, and numbers that the outputs of a batch may have at once.
_PART, _BATCH, _OUTPUTS = 1 << 15, 1 << 13, 1 << 23
_ABOUT, _DATA = "about.json", "data"

OnPart = Callable[[int, int], None]
"""Told after each part how many are done, and how many there are, on this rank."""


def predict(trained: TrainedModel, location: Path | str) -> Iterator[Answer]:
    """Yield what a model says of each row of some data, in order: a label, a score, or a forecast.

    The data is a prepared folder, or a file like those that the run's own data was prepared from.
    """
    with prepared(location, trained.subject) as folder:
        asked = ask(open_source(folder, trained.subject), trained.subject, trained.config.data)
        for part in _Parts.of(asked).each(0, 1):
            yield from _answer_part(trained, asked, part)


def write_predictions(
    trained: TrainedModel,
    location: Path | str,
    path: Path | str,
    world: World | None = None,
    *,
    sequence: str | None = None,
    on_part: OnPart = lambda done, count: None,
) -> int:
    """Write what a model says of each row of some data to a file of JSON lines, in order; return how many rows.

    With several ranks all must call it, with the same arguments and one file system. What was written before it was
    cut off is in `PATH.parts`, and is not asked again. `sequence` names the field of the records in a file.
    """
    path = Path(path)
    world = world or World(0, 1, trained.stack.device)
    mesh = Mesh(world, Topology(world.size, 1))
    folder = path.with_name(f"{path.name}.parts")
    if world.is_first:
        _claim(path, folder, _about(trained, location))
        if is_raw(location) and not (folder / _DATA).exists():
            prepare_source([location], folder / _DATA, trained.subject, sequence=sequence)
    mesh.add_up([0.0])
    source = open_source(folder / _DATA if is_raw(location) else location, trained.subject)
    asked = ask(source, trained.subject, trained.config.data)
    parts = _Parts.of(asked)
    own = list(parts.each(world.rank, world.size))
    for done, part in enumerate(own, 1):
        file = folder / f"{part.start // parts.size:08}.jsonl"
        if not file.exists():
            lines = (json.dumps(answer, ensure_ascii=False) for answer in _answer_part(trained, asked, part))
            write_whole(file, "".join(f"{line}\n" for line in lines).encode())
        on_part(done, len(own))
    mesh.add_up([0.0])
    if world.is_first:
        _join(path, folder, parts.count)
    mesh.add_up([0.0])
    return asked.num_rows


@dataclass(frozen=True)
class _Parts:
    """Rows in parts of one size, the last with what is left."""

    num_rows: int
    size: int

    @classmethod
    def of(cls, asked: Asked) -> "_Parts":
        return cls(asked.num_rows, max(1, int(_PART / max(asked.mean_length, 1))))

    @property
    def count(self) -> int:
        return -(-self.num_rows // self.size)

    def each(self, index: int, count: int) -> Iterator[range]:
        """Return every `count`th part from `index` on."""
        for part in range(index, self.count, count):
            yield range(part * self.size, min((part + 1) * self.size, self.num_rows))


def _answer_part(trained: TrainedModel, asked: Asked, part: Sequence[int]) -> list[Answer]:
    """The answers for some rows, in order; batches have rows of like lengths."""
    lengths = dict(zip(part, asked.lengths(part), strict=True))
    found: dict[int, list[Answer]] = {}
    batch: list[int] = []
    for number in sorted(part, key=lambda number: lengths[number]):
        if batch and (len(batch) + 1) * lengths[number] > _BATCH:
            found |= _answer_batch(trained, asked, batch, lengths)
            batch = []
        batch.append(number)
    found |= _answer_batch(trained, asked, batch, lengths)
    return [answer for number in part for answer in found[number]]


def _answer_batch(
    trained: TrainedModel, asked: Asked, numbers: Sequence[int], lengths: dict[int, int]
) -> dict[int, list[Answer]]:
    own = torch.tensor([lengths[number] for number in numbers])
    # A sequence of one token has no step at all, but a batch has.
    num_steps = max(1, int(own.max()))
    outputs = run_rows(trained, asked.inputs(numbers, num_steps), own)
    return dict(zip(numbers, asked.answers(numbers, own, outputs), strict=True))


@torch.no_grad()
def run_rows(trained: TrainedModel, inputs: Tensor, lengths: Tensor) -> Outputs:
    """Run a batch `[time, batch, ...]`; yield its outputs a few steps at a time, so that wide ones don't pile up."""
    stack = trained.stack.eval()
    device = stack.device
    num_rows = inputs.shape[1]
    rows = Rows(torch.arange(num_rows), lengths, torch.ones(num_rows, dtype=torch.bool), 0, device, stack.dtype)
    state = stack.initial_state(rows)
    room = _OUTPUTS // (num_rows * trained.subject.task.num_outputs)
    num_steps = max(1, room) if stack.causal else len(inputs)
    for start in range(0, len(inputs), num_steps):
        x = inputs[start : start + num_steps].to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=trained.config.run.precision == "bf16"):
            y, state = stack(x.to(stack.dtype) if x.is_floating_point() else x, state)
        yield start, y


def _about(trained: TrainedModel, location: Path | str) -> str:
    """What decides the answers: parts of another model or other data are not ours."""
    if is_raw(location):
        state = Path(location).stat()
        found = f"{Path(location).resolve()} {state.st_size} {state.st_mtime_ns}"
    else:
        found = Store.open(location).digest
    digest = hashlib.sha256()
    for name, tensor in sorted(trained.stack.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    data = trained.config.data.model_dump(mode="json", include={"context", "horizon", "season", "targets", "masks"})
    tree = {
        "weights": digest.hexdigest(),
        "data": found,
        "asked": {**data, "window": trained.config.data.window, "precision": trained.config.run.precision},
        "steps": [_PART, _BATCH],
    }
    return json.dumps(tree, sort_keys=True)


def _claim(path: Path, folder: Path, about: str) -> None:
    """Make the folder of parts, or find the one that was left; refuse what is somebody else's."""
    if path.exists():
        raise ConfigError(f"--out={path} exists already; give another, or delete it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / _ABOUT).exists():
            write_whole(folder / _ABOUT, about.encode())
        elif (folder / _ABOUT).read_text() != about:
            raise ConfigError(
                f"{folder} holds predictions of another model or other data; delete it, or give another --out"
            )
    except OSError as error:
        raise ConfigError(f"--out={path} can't be written ({error.strerror}); give another") from None


def _join(path: Path, folder: Path, count: int) -> None:
    """Put the parts together, and let them go."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as whole:
        for number in range(count):
            with (folder / f"{number:08}.jsonl").open("rb") as part:
                shutil.copyfileobj(part, whole)
    partial.replace(path)
    shutil.rmtree(folder)
