"""Summary: what a run was and what came of it, in words and figures."""

import math
from collections.abc import Mapping
from typing import Any

from stretto.config.run import RunConfig
from stretto.config.toml import dump_config
from stretto.plan.units import format_bytes
from stretto.report.checkpoint_inventory import CheckpointInventory
from stretto.report.curves import final_loss, smoothing_steps
from stretto.report.formatting import format_count, format_duration, format_percent, format_time, loss, pluralize
from stretto.report.markup import Html, tag
from stretto.report.page import definition_list, section, tiles
from stretto.report.record import Record, read_int, read_number, read_str


def final_metrics(record: Record) -> dict[str, str]:
    """Return what came of a run, by name; what isn't known is left out."""
    asks, held_out = record.asks, record.last_evaluation
    found: dict[str, str] = {}
    if record.best_evaluation is not None:
        best = record.best_evaluation
        found["best held-out loss"] = f"{loss(read_number(best, 'loss'))} at step {read_int(best, 'step'):,}"
    if held_out is not None:
        found["last held-out loss"] = loss(read_number(held_out, "loss"))
        for name, value in held_out.items():
            if name not in ("kind", "step", "loss", "tokens") and math.isfinite(read_number(held_out, name)):
                found[f"held-out {name.replace('_', ' ')}"] = f"{value:,.4g}"
    if record.last_step:
        found["training loss at the end"] = loss(final_loss(record))
        found["steps"] = f"{record.last_step:,}"
        found["epoch reached"] = f"{record.epoch:,}" if record.epoch else ""
        found[f"{asks} trained on"] = format_count(record.tokens)
        found["time in steps"] = format_duration(record.seconds)
        found[f"{asks} a second"] = format_count(record.speed)
    found["padding"] = format_percent(record.padding)
    if record.ranks is not None:
        found["bubble"] = format_percent(record.ranks.bubble)
        found["memory of the fullest rank"] = format_bytes(record.ranks.fullest)
    if record.saves.num_rows:
        found["size of a checkpoint"] = format_bytes(float(record.saves.mean("num_bytes")[-1]))
    found["steps skipped"] = f"{record.num_skipped:,}" if record.num_skipped else ""
    return {name: value for name, value in found.items() if value and value != "-"}


def summary_tiles(record: Record) -> Html:
    """Return the few figures that are asked for first."""
    found: list[tuple[str, str]] = []
    best = record.best_evaluation
    if best is not None:
        found.append((f"best held-out loss, at step {read_int(best, 'step'):,}", loss(read_number(best, "loss"))))
        if math.isfinite(read_number(best, "perplexity")):
            found.append(("its perplexity", f"{read_number(best, 'perplexity'):,.4g}"))
    if record.last_step:
        last = loss(final_loss(record))
        span = smoothing_steps(record)
        found.append((f"training loss, last {span:,} steps" if span > 1 else "training loss, last step", last))
        of = f" of {record.num_steps:,}" if record.num_steps and record.num_steps != record.last_step else ""
        found.append((f"steps{of}", f"{record.last_step:,}"))
        found.append((f"{record.asks} trained on", format_count(record.tokens)))
        found.append((f"{record.asks} a second", format_count(record.speed)))
        found.append(("time in steps", format_duration(record.seconds)))
    if record.ranks is not None and record.ranks.num_ranks > 1:
        found.append(("bubble: ranks waiting", format_percent(record.ranks.bubble)))
    return tiles([pair for pair in found if pair[1] != "-"])


def configuration_section(record: Record, inventory: CheckpointInventory) -> Html:
    """Return what the run was: model, data, layout, where and when; and its whole config, folded."""
    config = record.config
    pairs = [("folder", str(record.folder))]
    if config is None:
        pairs.append(("config", "missing, or of another version of stretto; what follows is from the log alone"))
    else:
        layout = config.layout
        pairs += [
            ("model", _describe_model(config, inventory)),
            ("data", _describe_data(record, config)),
            ("training", _describe_training(config)),
            ("layout", str(layout)),
            ("ran on", f"{pluralize(layout.num_ranks, 'rank')}, device {config.run.device}, {config.run.precision}"),
            ("seed", str(config.run.seed)),
        ]
    times = [claim.time for claim in inventory.claims.values() if claim.time]
    hosts = sorted({claim.host for claim in inventory.claims.values() if claim.host})
    if times:
        pairs.append(("first started", f"{format_time(min(times))}{f', on {hosts[0]}' if len(hosts) == 1 else ''}"))
    if len(times) > 1:
        pairs.append(("last started", format_time(max(times))))
    if len(hosts) > 1:
        pairs.append(("first ranks on", ", ".join(hosts)))
    if inventory.newest is not None:
        pairs.append(("last saved", format_time(inventory.newest.created)))
        pairs.append(("versions", ", ".join(f"{name} {value}" for name, value in inventory.newest.versions.items())))
    folded = None
    if config is not None:
        folded = tag("details", tag("summary", "The whole config"), tag("pre", dump_config(config).strip()))
    return section("run", "What was run", definition_list(pairs), folded)


def flatten_config(record: Record) -> dict[str, str]:
    """Return a config field by field, as text."""
    raw_config: Mapping[str, Any] = (
        record.raw_config if record.config is None else record.config.model_dump(mode="json")
    )
    found = {}
    for part, values in raw_config.items():
        for name, value in values.items() if isinstance(values, Mapping) else ():
            found[f"{part}.{name}"] = "none" if value is None else str(value)
    return found


def _describe_model(config: RunConfig, inventory: CheckpointInventory) -> str:
    model = config.model
    weights = "" if inventory.num_weights is None else f"; {inventory.num_weights:,} weights"
    if model.factory is not None:
        return f"{model.factory}{weights}"
    more = [
        f"projected to {model.projection}" if model.projection else "",
        f"dropout {model.dropout:g}" if model.dropout else "",
        "residual" if model.residual else "",
        "normalised" if model.norm else "",
    ]
    what = f"{pluralize(model.layers, f'{model.cell.upper()} layer')} of {model.hidden:,}"
    return ", ".join([what, *filter(None, more)]) + weights


def _describe_data(record: Record, config: RunConfig) -> str:
    data, task = config.data, record.subject.get("task")
    held_out = f", held out {data.valid}" if data.valid else ", nothing held out"
    asked = ""
    if isinstance(task, Mapping) and read_int(task, "num_inputs"):
        asked = (
            f"; {read_int(task, 'num_inputs'):,} {read_str(task, 'inputs')} in, targets for {read_str(task, 'targets')}"
        )
    return f"{data.train}{held_out}{asked}"


def _describe_training(config: RunConfig) -> str:
    train = config.train
    length = pluralize(train.steps, "step") if train.steps is not None else pluralize(train.epochs, "epoch")
    warm = f", warm-up of {pluralize(train.warmup, 'step')}" if train.warmup else ""
    clip = f", clipped to {train.clip:g}" if train.clip else ""
    return f"{length} of {train.optimizer}, learning rate {train.lr:g}, {train.schedule}{warm}{clip}"
