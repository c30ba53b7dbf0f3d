"""Several runs as one HTML page: their curves in shared charts, their results, and how their configs differ."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from stretto.base.errors import ConfigError
from stretto.base.units import pluralize
from stretto.report.curves import curves
from stretto.report.markup import Html, join, tag
from stretto.report.page import note, page, section, table
from stretto.report.record import Record
from stretto.report.record_reader import ProgressCallback, read_record
from stretto.report.summary import final_metrics, flatten_config

_MAX_RUNS = 8  # the number of colors in the style sheet


def render_comparison(folders: Sequence[Path | str], on_progress: ProgressCallback = lambda fraction: None) -> str:
    """Return a page that compares the runs in `folders`. It needs only a browser and no network."""
    if not 2 <= len(folders) <= _MAX_RUNS:
        raise ConfigError(f"{pluralize(len(folders), 'run')} can't be compared on one page; give 2 to {_MAX_RUNS}")
    records = [
        read_record(folder, lambda fraction, done=index: on_progress((done + fraction) / len(folders)))  # type: ignore[misc]
        for index, folder in enumerate(folders)
    ]
    runs = dict(zip(_names(folders), records, strict=True))
    title = " / ".join(runs)
    has_steps = any(record.steps.last_step for record in records)
    return page(
        f"Runs {title}",
        tag("header", tag("p", "Comparison of runs", class_="kind"), tag("h1", title)),
        _runs_table(runs),
        section("curves", "Training curves", curves(runs) if has_steps else note("None of the logs has steps yet.")),
        section("results", "Results", _results_table(runs)),
        section("configuration", "Differences in configuration", _differences(runs)),
        tag("footer", "Made by ", tag("code", "stretto report --compare"), " from the runs' files; needs no network."),
    )


def _runs_table(runs: Mapping[str, Record]) -> Html:
    rows = [
        (join(tag("span", class_=f"chip c{color}"), name), record.status, str(record.folder))
        for color, (name, record) in enumerate(runs.items())
    ]
    return table(("run", "status", "folder"), rows, text_columns=range(3))


def _results_table(runs: Mapping[str, Record]) -> Html:
    all_metrics = [final_metrics(record) for record in runs.values()]
    names = list(dict.fromkeys(name for metrics in all_metrics for name in metrics))
    return table(["metric", *runs], [[name, *(metrics.get(name, "-") for metrics in all_metrics)] for name in names])


def _differences(runs: Mapping[str, Record]) -> Html:
    configs = {name: config for name, record in runs.items() if (config := flatten_config(record))}
    if len(configs) < 2:
        return note("Unknown: fewer than two runs have a readable config.")
    names = sorted({name for config in configs.values() for name in config} - {"run.folder"})
    rows = [[name, *(config.get(name, "-") for config in configs.values())] for name in names]
    differences = [row for row in rows if len(set(row[1:])) > 1]
    if not differences:
        return note(f"None: the configs are the same except for the folder ({', '.join(configs)}).")
    return table(["field", *configs], differences, text_columns=range(len(configs) + 1))


def _names(folders: Sequence[Path | str]) -> list[str]:
    """Return the shortest ends of the paths that tell them apart; if two paths are equal, number all names."""
    paths = [Path(folder).resolve() for folder in folders]
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{path.name} ({number})" for number, path in enumerate(paths, 1)]
