"""Tables of a run's checkpoints and launches, and of one checkpoint, for `stretto show`."""

from collections import defaultdict
from collections.abc import Sequence

from rich.console import Console, Group
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from rich.table import Table

from stretto.base.errors import DataError
from stretto.base.run_folder import split_best
from stretto.base.units import pluralize
from stretto.checkpoint.best import best_name, read_scores
from stretto.checkpoint.checkpoint import (
    GENERATIONS,
    Checkpoint,
    RunListing,
    complete_checkpoint_names,
    find_checkpoint,
    find_storage,
    read_claims,
)
from stretto.checkpoint.lineage import lineage
from stretto.checkpoint.storage import Storage
from stretto.cli.views.console import make_console
from stretto.report.formatting import format_time


def show_run_or_checkpoint(path: str, allowed_locations: Sequence[str], *, is_quick: bool) -> None:
    """Print the run or the checkpoint at a path; unless `is_quick`, raise DataError at the end if a file is damaged."""
    console = make_console()
    run, is_best = split_best(path)
    storage = find_storage(run, allowed_locations=allowed_locations)
    if storage is not None and not is_best and (storage.names(GENERATIONS) or complete_checkpoint_names(storage)):
        console.print(_run_tables(storage))
    checkpoint = find_checkpoint(path, allowed_locations=allowed_locations)
    console.print(_summary(checkpoint))
    console.print(_tensor_table(checkpoint))
    num_files = len(checkpoint.manifest.files)
    if is_quick:
        console.print(f"{pluralize(num_files, 'file')}, checksums not verified; leave out --quick to verify them")
        return
    if (problem := _verify_checksums(console, checkpoint)) is not None:
        raise DataError(problem)
    console.print(f"{pluralize(num_files, 'file')}, all checksums match")


def _run_tables(storage: Storage) -> Group:
    """Return a table of all checkpoints of a run, and one of its launches and changes of ranks, from their claims."""
    claims = read_claims(storage)
    names = sorted(complete_checkpoint_names(storage), key=lambda name: (name.step, name.generation))
    lineage_names = lineage(RunListing.read(storage).chain, names)
    scores = read_scores(storage, names)
    best = best_name({name: score for name, score in scores.items() if name in lineage_names})
    score_name = "loss" if best is None else scores[best].name.replace("_", " ")
    table = Table("checkpoint", "step", "saved", "MB", f"val {score_name}", "", title=storage.location)
    for name in names:
        try:
            manifest = Checkpoint.open(storage, str(name)).manifest
            saved_at, size = format_time(manifest.created), f"{manifest.num_bytes / 1e6:,.1f}"
        except DataError:
            saved_at, size = "?", "damaged"
        marks = ["abandoned"] if name not in lineage_names else ["newest"] if name == lineage_names[0] else []
        marks += ["best"] if name == best else []
        is_listed = best is not None and name in scores and scores[name].name == scores[best].name
        value = f"{scores[name].value:.4f}" if is_listed else ""
        table.add_row(str(name), f"{name.step:,}", saved_at, size, value, ", ".join(marks))
    launches = Table("generation", "resumed from", "ranks", "host", "time", title="launches")
    for generation, claim in sorted(claims.items()):
        source = claim.resumed_from or "the beginning"
        launches.add_row(str(generation), source, str(claim.num_ranks), claim.host, format_time(claim.time))
    return Group(table, launches)


def _summary(checkpoint: Checkpoint) -> Table:
    manifest, state = checkpoint.manifest, checkpoint.manifest.training_state
    table = Table.grid("", "", padding=(0, 2))
    progress = "finished" if state.is_done else f"{state.progress:.1%} of the run"
    table.add_row("checkpoint", checkpoint.location)
    table.add_row("step", f"{state.step:,} ({progress})")
    # Epochs are counted from 1, as in StepReport; pools and windows from 0.
    table.add_row("position", f"epoch {state.epoch + 1}, pool {state.pool}, window {state.index} is next")
    table.add_row("saved", f"{format_time(manifest.created)} by generation {manifest.generation}")
    table.add_row("layout", f"{manifest.run_info.layout or 'not recorded'}, {pluralize(manifest.num_ranks, 'rank')}")
    spikes = f", {pluralize(state.spikes.num_rewinds, 'spike')} undone" if state.spikes.num_rewinds else ""
    skipped = f"{pluralize(state.skipped, 'step')} skipped{spikes}"
    table.add_row("optimizer", f"{state.optimizer}, seed {state.seed}, {skipped}")
    table.add_row("versions", ", ".join(f"{name} {version}" for name, version in manifest.versions.items()))
    table.add_row("size", f"{manifest.num_bytes / 1e6:,.2f} MB in {pluralize(len(manifest.files), 'file')}")
    return table


def _tensor_table(checkpoint: Checkpoint) -> Table:
    """Return a table of each block's weight shapes and the sizes of its weights, optimizer state and lanes' states.

    If the weights are averaged, it has the size of the averages too.
    """
    manifest = checkpoint.manifest
    kinds = ["weights", "optimizer", "lanes"]
    if manifest.training_state.num_averaged:
        kinds.append("average")
    sizes: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(kinds, 0))
    shapes: dict[str, list[str]] = defaultdict(list)
    for file in manifest.files:
        for shard in manifest.shards(file, checkpoint.location):
            kind, _, path = shard.name.partition(".")  # such as weights.blocks.2.cell.weight_ih_l0 or lanes.2.0
            block = path.removeprefix("blocks.").split(".")[0]
            sizes[block][kind] = sizes[block].get(kind, 0) + shard.num_bytes
    for name, tensor in sorted(manifest.tensors().items()):
        kind, _, path = name.partition(".")
        if kind == "weights":
            block, _, weight_name = path.removeprefix("blocks.").partition(".")
            shapes[block].append(f"{weight_name} {'x'.join(map(str, tensor.full_shape))}")
    table = Table("block", "weights", *(f"{kind} MB" for kind in kinds))
    # Numbered blocks first, in numeric order.
    for block, by_kind in sorted(sizes.items(), key=lambda item: (not item[0].isdigit(), item[0].zfill(9))):
        table.add_row(block, ", ".join(shapes[block]), *(f"{by_kind[kind] / 1e6:,.3f}" for kind in kinds))
    return table


def _verify_checksums(console: Console, checkpoint: Checkpoint) -> str | None:
    """Read every file; return the problem with the first damaged one, or None if all are intact."""
    columns = (TextColumn("reading"), BarColumn(bar_width=20), DownloadColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bars:
        task = bars.add_task("reading", total=checkpoint.manifest.num_bytes)
        files = checkpoint.manifest.files
        problems = [checkpoint.check(file, lambda count: bars.advance(task, count)) for file in files]
    return next((problem for problem in problems if problem is not None), None)
