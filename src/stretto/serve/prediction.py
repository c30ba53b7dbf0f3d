"""Predict: each row of some data once, in order, on any number of ranks, and again from where it was cut off.

rows     |---- part 0 ----|---- part 1 ----|---- part 2 ----|- 3 -|     cut by the data alone, never by the ranks
ranks         rank 0           rank 1           rank 0       rank 1     so that the answers are the same bits
files    PATH.parts/00000000.jsonl ...   ->   PATH, when all are there
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from stretto.base.disk import write_atomic
from stretto.base.errors import ConfigError, StrettoError
from stretto.base.window import Rows
from stretto.mesh.world import World
from stretto.serve.predictions import Outputs, PredictionDataset, PredictionRow, check_outputs, make_prediction_dataset
from stretto.serve.source import FieldNames, ensure_prepared, is_raw, open_source, prepare_source
from stretto.store.index import Store
from stretto.train.trained_model import TrainedModel

# Steps of a part, of a batch, and numbers that the outputs of a batch may have at once.
_PART_STEPS, _BATCH_STEPS, _MAX_OUTPUTS = 1 << 15, 1 << 13, 1 << 23
_MAX_PARTS = 4096
# Seconds between two signs of life of the first rank while others wait for it.
_POLL_SECONDS = 2.0
_FINGERPRINT, _DATA = "fingerprint.json", "data"

ProgressCallback = Callable[[int, int], None]
"""Told after each round how many parts are done, and how many there are, of all ranks."""


def predict(trained: TrainedModel, location: Path | str) -> Iterator[PredictionRow]:
    """Yield what a model says of each row of some data, in order: a label, a score, or a forecast.

    The data is a prepared folder, or a file like those that the run's own data was prepared from.
    """
    with ensure_prepared(location, trained.data_spec) as folder:
        dataset = make_prediction_dataset(
            open_source(folder, trained.data_spec), trained.data_spec, trained.config.data
        )
        parts = _PredictionParts.of(dataset)
        for number in range(parts.count):
            yield from _predict_part(trained, dataset, parts.rows(number))


def write_predictions(
    trained: TrainedModel,
    location: Path | str,
    path: Path | str,
    world: World | None = None,
    *,
    fields: FieldNames | None = None,
    on_progress: ProgressCallback = lambda done, count: None,
) -> int:
    """Write what a model says of each row of some data to a file of JSON lines, in order; return how many lines.

    With several ranks all must call it, with the same arguments and one file system. What was written before it was
    cut off is in `PATH.parts`, and is not asked again. `fields` names those of a file's records, where they differ.
    """
    path = Path(path)
    world = world or World(0, 1, trained.stack.device)
    folder = parts_folder(path)

    def begin() -> None:
        _claim_parts_folder(path, folder, _fingerprint(trained, location, fields))
        if is_raw(location) and not path.exists() and not (folder / _DATA).exists():
            try:
                prepare_source(location, folder / _DATA, trained.data_spec, fields)
            except StrettoError:
                # Nothing was answered: the same --out is free for data that can be read.
                shutil.rmtree(folder)
                raise

    def end() -> None:
        # It may have been cut off between the two.
        if not path.exists():
            _join_parts(path, folder)
        _remove_parts(folder)

    _run_on_first_rank(world, begin)
    if not any(world.all_reduce([float(world.is_rank_zero and path.exists())])):
        _write_missing_parts(trained, location, folder, world, on_progress)
    _run_on_first_rank(world, end)
    return int(sum(world.all_reduce([float(_count_lines(path)) if world.is_rank_zero else 0.0])))


def parts_folder(path: Path) -> Path:
    """Return where the parts of a file of predictions are until all are there."""
    return path.with_name(f"{path.name}.parts")


def _write_missing_parts(
    trained: TrainedModel, location: Path | str, folder: Path, world: World, on_progress: ProgressCallback
) -> None:
    source = open_source(folder / _DATA if is_raw(location) else location, trained.data_spec)
    dataset = make_prediction_dataset(source, trained.data_spec, trained.config.data)
    parts = _PredictionParts.of(dataset)
    missing = json.loads(world.broadcast_text(json.dumps(_missing_parts(folder, parts)) if world.is_rank_zero else ""))
    done = parts.count - len(missing)
    # All take a part, then all meet: nobody waits for another longer than a part takes.
    for start in range(0, len(missing), world.size):
        if start + world.rank < len(missing):
            number = missing[start + world.rank]
            _write_part(folder, number, _predict_part(trained, dataset, parts.rows(number)))
        world.barrier()
        done = min(done + world.size, parts.count)
        on_progress(done, parts.count)


def _run_on_first_rank(world: World, function: Callable[[], None]) -> None:
    """Do something on the first rank, even if it takes longer than ranks wait for each other; then all go on."""
    if world.is_single_rank:
        function()
        return
    if not world.is_rank_zero:
        while any(world.all_reduce([0.0])):
            pass
        return
    with ThreadPoolExecutor(1) as thread:
        doing = thread.submit(function)
        while not doing.done():
            world.all_reduce([1.0])
            wait([doing], _POLL_SECONDS)
        doing.result()
    # A sum of zero ends the loop of the other ranks.
    world.all_reduce([0.0])


@dataclass(frozen=True)
class _PredictionParts:
    """Rows in parts of one size, the last with what is left."""

    num_rows: int
    size: int

    @classmethod
    def of(cls, dataset: PredictionDataset) -> "_PredictionParts":
        # No more than a folder can hold, however many rows there are.
        size = max(int(_PART_STEPS / max(dataset.mean_length, 1)), dataset.num_rows // _MAX_PARTS, 1)
        return cls(dataset.num_rows, size)

    @property
    def count(self) -> int:
        return -(-self.num_rows // self.size)

    def rows(self, number: int) -> range:
        return range(number * self.size, min((number + 1) * self.size, self.num_rows))


def _predict_part(trained: TrainedModel, dataset: PredictionDataset, part: Sequence[int]) -> list[PredictionRow]:
    """The answers for some rows, in order; batches have rows of like lengths."""
    lengths = dict(zip(part, dataset.lengths(part), strict=True))
    found: dict[int, list[PredictionRow]] = {}
    batch: list[int] = []
    for number in sorted(part, key=lambda number: lengths[number]):
        if batch and (len(batch) + 1) * lengths[number] > _BATCH_STEPS:
            found |= _predict_batch(trained, dataset, batch, lengths)
            batch = []
        batch.append(number)
    found |= _predict_batch(trained, dataset, batch, lengths)
    return [answer for number in part for answer in found[number]]


def _predict_batch(
    trained: TrainedModel, dataset: PredictionDataset, indices: Sequence[int], lengths: dict[int, int]
) -> dict[int, list[PredictionRow]]:
    own = torch.tensor([lengths[number] for number in indices])
    # A sequence of one token has no step at all, but a batch has.
    num_steps = max(1, int(own.max()))
    outputs = run_batch(trained, dataset.inputs(indices, num_steps), own)
    return dict(zip(indices, dataset.decode(indices, own, outputs), strict=True))


@torch.no_grad()
def run_batch(trained: TrainedModel, inputs: Tensor, lengths: Tensor) -> Outputs:
    """Run a batch `[time, batch, ...]`; yield its outputs a few steps at a time, so that wide ones don't pile up."""
    stack = trained.stack.eval()
    device = stack.device
    num_rows = inputs.shape[1]
    rows = Rows(torch.arange(num_rows), lengths, torch.ones(num_rows, dtype=torch.bool), 0, device, stack.dtype)
    state = stack.initial_state(rows)
    room = _MAX_OUTPUTS // (num_rows * trained.data_spec.task.num_outputs)
    num_steps = max(1, room) if stack.causal else len(inputs)
    for start in range(0, len(inputs), num_steps):
        x = inputs[start : start + num_steps].to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=trained.config.run.precision == "bf16"):
            y, state = stack(x.to(stack.dtype) if x.is_floating_point() else x, state)
        yield start, check_outputs(y, trained.data_spec.task)


def _fingerprint(trained: TrainedModel, location: Path | str, fields: FieldNames | None) -> str:
    """What decides the answers: parts of another model or other data are not ours."""
    if is_raw(location):
        state = Path(location).stat()
        found = f"{Path(location).resolve()} {state.st_size} {state.st_mtime_ns} {fields or FieldNames()}"
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
        "settings": {**data, "window": trained.config.data.window, "precision": trained.config.run.precision},
        "steps": [_PART_STEPS, _BATCH_STEPS],
    }
    return json.dumps(tree, sort_keys=True)


def _claim_parts_folder(path: Path, folder: Path, fingerprint: str) -> None:
    """Make the folder of parts, or find the one that was left; refuse what is somebody else's."""
    try:
        is_left = (folder / _FINGERPRINT).exists()
        if path.exists() and not is_left:
            raise ConfigError(f"--out={path} exists already; give another, or delete it")
        folder.mkdir(parents=True, exist_ok=True)
        if not is_left:
            write_atomic(folder / _FINGERPRINT, fingerprint.encode())
        elif (folder / _FINGERPRINT).read_text() != fingerprint:
            raise ConfigError(
                f"{folder} holds predictions of another model or other data; delete it, or give another --out"
            )
    except OSError as error:
        raise ConfigError(f"--out={path} can't be written ({error.strerror}); give another") from None


def _part_path(folder: Path, number: int) -> Path:
    return folder / f"{number:08}.jsonl"


def _missing_parts(folder: Path, parts: _PredictionParts) -> list[int]:
    there = {path.name for path in folder.glob("*.jsonl")}
    return [number for number in range(parts.count) if _part_path(folder, number).name not in there]


def _write_part(folder: Path, number: int, answers: Sequence[PredictionRow]) -> None:
    lines = "".join(f"{json.dumps(answer, ensure_ascii=False)}\n" for answer in answers)
    try:
        write_atomic(_part_path(folder, number), lines.encode())
    except OSError as error:
        raise ConfigError(
            f"{folder} can't be written ({error.strerror}); make room, or give --out a place that all hosts see"
        ) from None


def _join_parts(path: Path, folder: Path) -> None:
    """Put the parts together."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("wb") as whole:
            for file in sorted(folder.glob("*.jsonl")):
                with file.open("rb") as part:
                    shutil.copyfileobj(part, whole)
        partial.replace(path)
    except OSError as error:
        raise ConfigError(f"--out={path} can't be written ({error.strerror}); make room, and try again") from None


def _remove_parts(folder: Path) -> None:
    """Let the parts go; what says whose they are last, so that a cut in the middle of this is known as one."""
    for file in sorted(folder.iterdir(), key=lambda file: file.name == _FINGERPRINT):
        if file.is_dir():
            shutil.rmtree(file)
        else:
            file.unlink()
    folder.rmdir()


def _count_lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
