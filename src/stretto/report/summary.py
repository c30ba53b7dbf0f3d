"""The configuration and the results of a run, as text and numbers."""

import math
from collections.abc import Mapping
from typing import Any

from stretto.base.metric_names import EVALUATION_FIELDS
from stretto.base.units import format_bytes, format_duration, pluralize
from stretto.config.run import RunConfig
from stretto.config.toml import dump_config
from stretto.report.checkpoint_inventory import CheckpointInventory
from stretto.report.curves import final_loss
from stretto.report.formatting import format_count, format_finite_loss, format_percent, format_time
from stretto.report.markup import Html, tag
from stretto.report.page import definition_list, section, tiles
from stretto.report.record import EvaluationHistory, Record, read_int, read_number, read_str


def final_metrics(record: Record) -> dict[str, str]:
    """Return the results of a run by name. Values that are empty or formatted as `-` are left out."""
    target_name, steps, evaluations = record.target_name, record.steps, record.evaluations
    metrics: dict[str, str] = {}
    if evaluations.best is not None:
        name, value = _best_score(evaluations)
        metrics[name] = f"{value} at step {read_int(evaluations.best, 'step'):,}"
    if evaluations.last is not None:
        metrics["last validation loss"] = format_finite_loss(read_number(evaluations.last, "loss"))
        for name, value in evaluations.last.items():
            is_score = name not in EVALUATION_FIELDS
            if is_score and math.isfinite(read_number(evaluations.last, name)):
                metrics[f"validation {name.replace('_', ' ')}"] = f"{value:,.4g}"
    if steps.last_step:
        metrics["final training loss"] = format_finite_loss(final_loss(steps))
        metrics["steps"] = f"{steps.last_step:,}"
        metrics["epoch reached"] = f"{steps.epoch:,}" if steps.epoch else ""
        metrics[f"{target_name} trained on"] = format_count(steps.num_targets)
        metrics["time spent in steps"] = format_duration(steps.seconds)
        metrics[f"{target_name} per second"] = format_count(steps.speed)
    metrics["padding"] = format_percent(steps.padding)
    if record.ranks.num_ranks:
        metrics["bubble"] = format_percent(record.ranks.bubble)
        metrics["highest memory use of a rank"] = format_bytes(record.ranks.max_memory)
    if record.saves.series.num_rows:
        metrics["checkpoint size"] = format_bytes(float(record.saves.series.mean("num_bytes")[-1]))
    metrics["skipped steps"] = f"{steps.num_skipped:,}" if steps.num_skipped else ""
    return {name: value for name, value in metrics.items() if value and value != "-"}


def summary_tiles(record: Record) -> Html:
    """Return the most important results of a run in large type."""
    pairs: list[tuple[str, str]] = []
    best, steps, target_name = record.evaluations.best, record.steps, record.target_name
    if best is not None:
        monitor, step = record.evaluations.monitor, f"at step {read_int(best, 'step'):,}"
        name, value = _best_score(record.evaluations)
        pairs.append((f"{name}, {step}", value))
        if monitor != "loss":
            pairs.append((f"validation loss {step}", format_finite_loss(read_number(best, "loss"))))
        if monitor != "perplexity" and math.isfinite(read_number(best, "perplexity")):
            pairs.append((f"perplexity {step}", f"{read_number(best, 'perplexity'):,.4g}"))
    if steps.last_step:
        span = steps.smoothing_span
        name = f"training loss, smoothed over {span:,} steps" if span > 1 else "training loss, last step"
        planned = None if record.config is None else record.config.train.steps
        of_planned = f" of {planned:,}" if planned and planned != steps.last_step else ""
        pairs += [
            (name, format_finite_loss(final_loss(steps))),
            (f"steps{of_planned}", f"{steps.last_step:,}"),
            (f"{target_name} trained on", format_count(steps.num_targets)),
            (f"{target_name} per second", format_count(steps.speed)),
            ("time spent in steps", format_duration(steps.seconds)),
        ]
    if record.ranks.num_ranks > 1:
        pairs.append(("bubble: idle time of ranks", format_percent(record.ranks.bubble)))
    return tiles([pair for pair in pairs if pair[1] != "-"])


def _best_score(evaluations: EvaluationHistory) -> tuple[str, str]:
    """Return the name and the value of the monitored metric of the best evaluation; there is one."""
    score = evaluations.best_score
    assert score is not None
    value = format_finite_loss(score.value) if score.name == "loss" else f"{score.value:,.4g}"
    return f"best validation {score.name.replace('_', ' ')}", value


def configuration_section(record: Record, inventory: CheckpointInventory) -> Html:
    """Return the section with a run's model, data, layout, launch times and hosts; its complete config is collapsed."""
    config = record.config
    pairs, collapsed = [("folder", str(record.folder))], None
    if config is None:
        pairs.append(("config", f"some sections of this page need it, but {record.config_problem}"))
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
        collapsed = tag("details", tag("summary", "Complete config"), tag("pre", dump_config(config).strip()))
    times = [claim.time for claim in inventory.claims.values() if claim.time]
    hosts = sorted({claim.host for claim in inventory.claims.values() if claim.host})
    if times:
        pairs.append(("first launched", f"{format_time(min(times))}{f', on {hosts[0]}' if len(hosts) == 1 else ''}"))
    if len(times) > 1:
        pairs.append(("last launched", format_time(max(times))))
    if len(hosts) > 1:
        pairs.append(("hosts of rank 0", ", ".join(hosts)))
    if inventory.newest is not None:
        pairs.append(("last saved", format_time(inventory.newest.created)))
        pairs.append(("versions", ", ".join(f"{name} {value}" for name, value in inventory.newest.versions.items())))
    return section("configuration", "Configuration", definition_list(pairs), collapsed)


def flatten_config(record: Record) -> dict[str, str]:
    """Return the fields of a run's config as text, by dotted name; if the config is invalid, as in its file."""
    sections: Mapping[str, Any] = record.raw_config if record.config is None else record.config.model_dump(mode="json")
    return {
        f"{section_name}.{name}": "none" if value is None else str(value)
        for section_name, fields in sections.items()
        if isinstance(fields, Mapping)
        for name, value in fields.items()
    }


def _describe_model(config: RunConfig, inventory: CheckpointInventory) -> str:
    model = config.model
    parameters = "" if inventory.num_parameters is None else f"; {inventory.num_parameters:,} parameters"
    if model.factory is not None:
        return f"{model.factory}{parameters}"
    options = [
        f"projected to {model.projection}" if model.projection else "",
        f"dropout {model.dropout:g}" if model.dropout else "",
        "residual" if model.residual else "",
        "layer norm" if model.norm else "",
    ]
    layers = f"{pluralize(model.layers, f'{model.cell.upper()} layer')} of {model.hidden:,}"
    return ", ".join([layers, *filter(None, options)]) + parameters


def _describe_data(record: Record, config: RunConfig) -> str:
    data, task = config.data, record.data_spec.get("task")
    validation = f", validation {data.valid}" if data.valid else ", no validation data"
    task_text = ""
    if isinstance(task, Mapping) and (num_inputs := read_int(task, "num_inputs")):
        inputs, targets = read_str(task, "inputs"), read_str(task, "targets")
        unit = "in the vocabulary" if inputs == "tokens" else "values per time step"
        task_text = f"; inputs: {inputs} ({num_inputs:,} {unit}), targets: {targets}"
    return f"{data.source}{validation}{task_text}"


def _describe_training(config: RunConfig) -> str:
    train = config.train
    length = pluralize(train.steps, "step") if train.steps is not None else pluralize(train.epochs, "epoch")
    warmup = f", {pluralize(train.warmup, 'warm-up step')}" if train.warmup else ""
    clip = f", gradients clipped to norm {train.clip:g}" if train.clip else ""
    patience = "" if train.patience is None else f", stops early after {pluralize(train.patience, 'evaluation')}"
    schedule = f"{train.schedule.replace('_', ' ')} schedule{warmup}"
    patience += "" if train.average == "none" else f", weights averaged ({train.average.upper()})"
    return f"{length} of {train.optimizer}, learning rate {train.lr:g}, {schedule}{clip}{patience}"
