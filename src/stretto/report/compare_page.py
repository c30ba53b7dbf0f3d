"""Several runs as one HTML page: their curves in one chart, their results, and how their configs differ."""

from collections.abc import Sequence
from pathlib import Path

from stretto.base.errors import ConfigError
from stretto.report.curves import NamedRun, curves
from stretto.report.markup import Html, tag
from stretto.report.page import note, page, section, table
from stretto.report.record_reader import ProgressCallback, read_record
from stretto.report.summary import final_metrics, flatten_config

# As many as there are colors.
_MAX_RUNS = 8


def render_comparison(folders: Sequence[Path | str], on_progress: ProgressCallback = lambda fraction: None) -> str:
    """Return a page that compares the runs in `folders`. It needs only a browser and no network."""
    if not 2 <= len(folders) <= _MAX_RUNS:
        raise ConfigError(f"{len(folders)} runs can't be compared on one page; give 2 to {_MAX_RUNS}")
    number = len(folders)
    records = [
        read_record(folder, lambda fraction, done=index: on_progress((done + fraction) / number))  # type: ignore[misc]
        for index, folder in enumerate(folders)
    ]
    runs = [NamedRun(name, record) for name, record in zip(_names(folders), records, strict=True)]
    title = " / ".join(run.name for run in runs)
    has_steps = any(run.record.steps.last for run in runs)
    return page(
        f"Runs {title}",
        tag("header", tag("p", "Comparison of runs", class_="kind"), tag("h1", title)),
        _runs_table(runs),
        section("curves", "Training curves", curves(runs) if has_steps else note("None of the logs has a step yet.")),
        section("results", "Results", _results_table(runs)),
        section("configuration", "Differences in configuration", _differences(runs)),
        tag("footer", "Made by `stretto report --compare` from the files of the runs; it needs no network."),
    )


def _runs_table(runs: Sequence[NamedRun]) -> Html:
    rows = [
        tag("tr", tag("td", tag("span", class_=f"chip c{color}"), run.name, class_="text"),
            tag("td", run.record.status, class_="text"), tag("td", str(run.record.folder), class_="text"))
        for color, run in enumerate(runs)
    ]  # fmt: skip
    headers = tag("tr", *(tag("th", name, scope="col", class_="text") for name in ("run", "status", "folder")))
    return tag("div", tag("table", tag("thead", headers), tag("tbody", *rows)), class_="scroll")


def _results_table(runs: Sequence[NamedRun]) -> Html:
    all_metrics = [final_metrics(run.record) for run in runs]
    names = list(dict.fromkeys(name for metrics in all_metrics for name in metrics))
    rows = [[name, *(metrics.get(name, "-") for metrics in all_metrics)] for name in names]
    return table(["metric", *(run.name for run in runs)], rows)


def _differences(runs: Sequence[NamedRun]) -> Html:
    configs = [flatten_config(run.record) for run in runs]
    names = sorted({name for config in configs for name in config} - {"run.folder"})
    rows = [[name, *(config.get(name, "-") for config in configs)] for name in names]
    differences = [row for row in rows if len(set(row[1:])) > 1]
    if not differences:
        return note("None: the configs are the same except for the folder.")
    return table(["field", *(run.name for run in runs)], differences, text_columns=range(len(runs) + 1))


def _names(folders: Sequence[Path | str]) -> list[str]:
    """Return the last part of each path, or as many parts as it takes to tell all paths apart."""
    paths = [Path(folder).resolve() for folder in folders]
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{path.name} ({number})" for number, path in enumerate(paths, 1)]
