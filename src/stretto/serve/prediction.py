"""predict and write_predictions: results for all rows, in order; writing uses any number of ranks and can be resumed.

rows     |---- part 0 ----|---- part 1 ----|---- part 2 ----|- 3 -|     parts don't depend on the number of ranks,
ranks         rank 0           rank 1           rank 0       rank 1     so any number gives bitwise equal results
files    PATH.parts/00000000.jsonl ...   ->   PATH, when all parts are written
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import torch
from torch import Tensor

from stretto.base.disk import atomic_path, explain_write_errors, write_atomic
from stretto.base.errors import ConfigError, StrettoError
from stretto.base.fingerprint import fingerprint
from stretto.base.window import Rows
from stretto.blocks.head_loss import class_outputs
from stretto.mesh.world import World
from stretto.prepare.downloads import localize
from stretto.serve.prediction_dataset import (
    Outputs,
    PredictionDataset,
    PredictionResult,
    check_outputs,
    make_prediction_dataset,
)
from stretto.serve.row_decoder import find_row_decoder
from stretto.serve.source import FieldNames, ensure_prepared, is_raw, open_source, prepare_source
from stretto.store.index import Store
from stretto.train.trained_model import TrainedModel, check_location

# Approximate numbers of time steps per part and per batch, and of output values in memory at a time.
_PART_STEPS, _BATCH_STEPS, _MAX_OUTPUTS = 1 << 15, 1 << 13, 1 << 23
_MAX_PARTS = 4096  # files in the parts folder; large data gets larger parts
# Seconds between two all-reduces while the other ranks wait for rank 0, so that they don't time out.
_POLL_SECONDS = 2.0
_FINGERPRINT_NAME, _DATA_NAME = "fingerprint", "data"
# The version of the parts folder's format; increase it when its file names or the fields of the results change.
_VERSION = 4

ProgressCallback = Callable[[int, int], None]
"""Called after each round (at most one part per rank) with the numbers of finished parts and of all parts."""


def predict(trained: TrainedModel, location: Path | str, *, beam: int | None = None) -> Iterator[PredictionResult]:
    """Yield a model's results for some data, in the order of its rows: labels, losses with perplexities, or forecasts.

    The data is a prepared folder or its URL, or a file in the same format as those the run's data was prepared from.
    Each result is a dict: a line of the file that `write_predictions` writes. The outputs of a model that was trained
    with CTC are decoded: by the most likely path, or by prefix beam search with the width `beam`.
    """
    check_location(location, "call predict_arrays for rows in memory")
    with ensure_prepared(location, trained.data_spec) as folder:
        dataset = _open_dataset(trained, folder, beam)
        for part in _split_into_parts(dataset):
            yield from _predict_part(trained, dataset, part)


def write_predictions(
    trained: TrainedModel,
    location: Path | str,
    path: Path | str,
    world: World | None = None,
    *,
    fields: FieldNames | None = None,
    beam: int | None = None,
    on_progress: ProgressCallback = lambda done, count: None,
) -> int:
    """Write the results of `predict` to a JSON Lines file, one per line; return the number of lines.

    Several ranks must all make the same call, and share a file system. After an interruption, repeat the call to
    continue: finished parts are kept in `PATH.parts`. `fields`, a `stretto.serve.source.FieldNames`,
    names the fields of a file's records where they differ from those of the run's files. `beam` is that of `predict`.
    """
    path = Path(path)
    world = world or World(rank=0, size=1, device=trained.stack.device)
    folder = parts_folder(path)
    find_row_decoder(trained, beam)  # raises if it can't decode, before anything is written

    def begin() -> None:
        _claim_parts_folder(path, folder, _job_fingerprint(trained, location, fields, beam))
        if is_raw(location) and not path.exists() and not (folder / _DATA_NAME).exists():
            try:
                prepare_source(location, folder / _DATA_NAME, trained.data_spec, fields)
            except StrettoError:
                # No result was written: leave the path free for a call with valid data.
                shutil.rmtree(folder)
                raise

    def end() -> None:
        # An earlier call may have been interrupted between these two steps.
        if not path.exists():
            _join_parts(path, folder)
        _remove_parts(folder)

    _run_on_rank_zero(world, begin)
    # If the file exists, an earlier call joined all parts. Only rank 0 checks; the all-reduce tells the other ranks.
    if not any(world.all_reduce([float(world.is_rank_zero and path.exists())])):
        dataset = _open_dataset(trained, folder / _DATA_NAME if is_raw(location) else location, beam)
        _write_missing_parts(trained, dataset, folder, world, on_progress)
    _run_on_rank_zero(world, end)
    return int(sum(world.all_reduce([float(_count_lines(path)) if world.is_rank_zero else 0.0])))


def parts_folder(path: Path) -> Path:
    """Return the folder that holds the parts of a predictions file until all are written."""
    return path.with_name(f"{path.name}.parts")


def _open_dataset(trained: TrainedModel, location: Path | str, beam: int | None) -> PredictionDataset:
    decoder = find_row_decoder(trained, beam)
    source, config = open_source(location, trained.data_spec), trained.config
    return make_prediction_dataset(source, trained.data_spec, config.data, config.model.predicted_quantiles, decoder)


def _write_missing_parts(
    trained: TrainedModel, dataset: PredictionDataset, folder: Path, world: World, on_progress: ProgressCallback
) -> None:
    parts = _split_into_parts(dataset)
    # Rank 0 decides: on a network file system, other ranks may not see the newest files yet.
    written = {path.name for path in folder.glob("*.jsonl")}
    missing = [number for number in range(len(parts)) if _part_path(folder, number).name not in written]
    missing = json.loads(world.broadcast_text(json.dumps(missing) if world.is_rank_zero else ""))
    done = len(parts) - len(missing)
    # With a barrier after each round, no rank waits longer than one part takes.
    for start in range(0, len(missing), world.size):
        if start + world.rank < len(missing):
            number = missing[start + world.rank]
            results = _predict_part(trained, dataset, parts[number])
            lines = "".join(f"{json.dumps(result, ensure_ascii=False)}\n" for result in results)
            with explain_write_errors(folder, "free some space, or choose a file on a shared file system"):
                write_atomic(_part_path(folder, number), lines.encode())
        world.barrier()
        done = min(done + world.size, len(parts))
        on_progress(done, len(parts))


def _run_on_rank_zero(world: World, function: Callable[[], None]) -> None:
    """Call a function on rank 0 while the others wait, even for longer than a collective's timeout."""
    if world.is_single_rank:
        function()
        return
    if not world.is_rank_zero:
        while any(world.all_reduce([0.0])):
            pass
        return
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(function)
        while not future.done():
            world.all_reduce([1.0])
            wait([future], _POLL_SECONDS)
        future.result()
    # A sum of zero ends the loop of the other ranks.
    world.all_reduce([0.0])


def _split_into_parts(dataset: PredictionDataset) -> list[range]:
    """Split rows into parts of the same size; the last part can be smaller."""
    size = max(int(_PART_STEPS / max(dataset.mean_length, 1)), -(-dataset.num_rows // _MAX_PARTS), 1)
    return [range(start, min(start + size, dataset.num_rows)) for start in range(0, dataset.num_rows, size)]


def _predict_part(trained: TrainedModel, dataset: PredictionDataset, part: Sequence[int]) -> list[PredictionResult]:
    """Return the results for some rows, in order; rows of similar length are batched together."""
    lengths = dict(zip(part, dataset.lengths(part), strict=True))
    batches: list[list[int]] = [[]]
    for index in sorted(part, key=lambda index: lengths[index]):
        if batches[-1] and (len(batches[-1]) + 1) * lengths[index] > _BATCH_STEPS:
            batches.append([])
        batches[-1].append(index)
    results: dict[int, list[PredictionResult]] = {}
    for batch in batches:
        row_lengths = torch.tensor([lengths[index] for index in batch])
        # A sequence of one token has nothing to predict and so length 0, but a batch needs at least one time step.
        outputs = run_batch(trained, dataset.inputs(batch, max(1, int(row_lengths.max()))), row_lengths)
        num_outputs = -(-row_lengths // trained.stack.stride)
        results |= zip(batch, dataset.decode(batch, num_outputs, outputs), strict=True)
    return [result for index in part for result in results[index]]


@torch.no_grad()
def run_batch(trained: TrainedModel, inputs: Tensor, lengths: Tensor) -> Outputs:
    """Run a batch `[time, batch, ...]`; yield its outputs, chunk by chunk in time if the model is causal.

    Each chunk comes with the index of its first output.
    """
    stack = trained.stack.eval()
    device, num_rows = stack.device, inputs.shape[1]
    fresh = torch.ones(num_rows, dtype=torch.bool)
    rows = Rows(torch.arange(num_rows), lengths, fresh, key=0, device=device, dtype=stack.dtype)
    state = stack.initial_state(rows)
    max_steps = _MAX_OUTPUTS // (num_rows * trained.num_outputs)
    chunk_steps = max(1, max_steps) * stack.stride if stack.causal else len(inputs)
    for start in range(0, len(inputs), chunk_steps):
        x = inputs[start : start + chunk_steps].to(device)
        with trained.autocast():
            y, state = stack(x.to(stack.dtype) if x.is_floating_point() else x, state)
        yield start // stack.stride, check_outputs(class_outputs(stack.loss, y), trained.num_outputs)


def _job_fingerprint(trained: TrainedModel, location: Path | str, fields: FieldNames | None, beam: int | None) -> str:
    """Return a hash of everything that the results depend on: model, data and settings."""
    if is_raw(location):
        file = localize(location)
        status = file.stat()
        source = f"{file.resolve()} {status.st_size} {status.st_mtime_ns} {fields or FieldNames()}"
    else:
        source = Store.open(location).digest
    weights = hashlib.sha256()
    for name, tensor in sorted(trained.stack.state_dict().items()):
        weights.update(name.encode())
        weights.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    settings = {"context", "horizon", "season", "targets", "known_future", "static", "masks", "window"}
    return fingerprint(
        {
            "version": _VERSION,
            "weights": weights.hexdigest(),
            "data": source,
            "settings": trained.config.data.model_dump(mode="json", include=settings),
            "quantiles": trained.config.model.predicted_quantiles,
            "beam": beam,
            "precision": trained.config.run.precision,
            "tf32": trained.config.run.tf32,
            "steps": [_PART_STEPS, _BATCH_STEPS],
        }
    )


def _claim_parts_folder(path: Path, folder: Path, job_fingerprint: str) -> None:
    """Create the parts folder, or reuse the one of an interrupted call; reject one of a different job."""
    with explain_write_errors(path):
        _reject_links(folder)
        is_resumed = (folder / _FINGERPRINT_NAME).exists()
        if path.exists() and not is_resumed:
            raise ConfigError(f"{path} already exists; choose a different file, or delete it")
        folder.mkdir(parents=True, exist_ok=True)
        if not is_resumed:
            write_atomic(folder / _FINGERPRINT_NAME, job_fingerprint.encode())
        elif (folder / _FINGERPRINT_NAME).read_text() != job_fingerprint:
            raise ConfigError(
                f"{folder} has results from a different model, data or settings; delete it, or choose a different file"
            )


def _reject_links(folder: Path) -> None:
    """Raise if the parts folder, or something in it, is a link: by default it is in a run's folder, from anyone."""
    for path in (folder, *(folder.iterdir() if folder.is_dir() else ())):
        if path.is_symlink():
            raise ConfigError(f"{path} is a symbolic link; delete it, or choose a different file")


def _part_path(folder: Path, number: int) -> Path:
    return folder / f"{number:08}.jsonl"


def _join_parts(path: Path, folder: Path) -> None:
    """Concatenate the parts into one file."""
    with (
        explain_write_errors(path, "free some space, and try again"),
        atomic_path(path) as partial,
        partial.open("wb") as out,
    ):
        for file in sorted(folder.glob("*.jsonl")):
            with file.open("rb") as part:
                shutil.copyfileobj(part, out)


def _remove_parts(folder: Path) -> None:
    """Delete the parts folder; the fingerprint goes last, so that an interrupted deletion can be resumed."""
    for file in sorted(folder.iterdir(), key=lambda file: file.name == _FINGERPRINT_NAME):
        if file.is_dir():
            shutil.rmtree(file)
        else:
            file.unlink()
    folder.rmdir()


def _count_lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
