"""Runs side by side, as one HTML page: curves over each other, what their configs differ in, and what came of each."""

from collections.abc import Sequence
from pathlib import Path

from stretto.base.errors import ConfigError
from stretto.report.curves import NamedRun, curves
from stretto.report.markup import Html, tag
from stretto.report.page import note, page, section, table
from stretto.report.record import ProgressCallback, read_record
from stretto.report.summary import final_metrics, flatten_config

# As many as there are colours.
MOST_RUNS = 8


def render_comparison(folders: Sequence[Path | str], on_progress: ProgressCallback = lambda part: None) -> str:
    """Return a page that compares the runs in some folders; it needs nothing but a browser."""
    if not 2 <= len(folders) <= MOST_RUNS:
        raise ConfigError(f"{len(folders)} runs can't be compared on one page; give 2 to {MOST_RUNS}")
    number = len(folders)
    records = [
        read_record(folder, lambda part, done=index: on_progress((done + part) / number))  # type: ignore[misc]
        for index, folder in enumerate(folders)
    ]
    runs = [NamedRun(name, record) for name, record in zip(_names(folders), records, strict=True)]
    legend = [
        tag("tr", tag("td", _chip(index), run.name, class_="text"), tag("td", run.record.status, class_="text"),
            tag("td", str(run.record.folder), class_="text"))
        for index, run in enumerate(runs)
    ]  # fmt: skip
    heads = tag("tr", *(tag("th", head, scope="col", class_="text") for head in ("run", "status", "folder")))
    listed = tag("div", tag("table", tag("thead", heads), tag("tbody", *legend)), class_="scroll")
    title = " / ".join(run.name for run in runs)
    has_steps = any(run.record.last_step for run in runs)
    return page(
        f"Runs {title}",
        tag("header", tag("p", "Runs side by side", class_="kind"), tag("h1", title)),
        listed,
        section("curves", "Curves", curves(runs) if has_steps else note("None of the logs has a step yet.")),
        section("results", "Final results", _figures(runs)),
        section("config", "What differs in their configs", _differences(runs)),
        tag("footer", "Made by `stretto report --compare` from the files of the runs; it needs no network."),
    )


def _figures(runs: Sequence[NamedRun]) -> Html:
    found = [final_metrics(run.record) for run in runs]
    names = list(dict.fromkeys(name for figures in found for name in figures))
    rows = [[name, *(figures.get(name, "-") for figures in found)] for name in names]
    return table(["figure", *(run.name for run in runs)], rows)


def _differences(runs: Sequence[NamedRun]) -> Html:
    configs = [flatten_config(run.record) for run in runs]
    names = sorted({name for config in configs for name in config} - {"run.folder"})
    rows = []
    for name in names:
        values = [config.get(name, "-") for config in configs]
        if len(set(values)) > 1:
            rows.append([name, *values])
    if not rows:
        return note("Nothing: their configs are the same but for the folder.")
    return table(["field", *(run.name for run in runs)], rows, text_columns=range(len(runs) + 1))


def _chip(index: int) -> Html:
    return tag("span", class_=f"chip c{index}")


def _names(folders: Sequence[Path | str]) -> list[str]:
    """The last part of each path, or more of it where two have the same."""
    paths = [Path(folder).resolve() for folder in folders]
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{path.name} ({number})" for number, path in enumerate(paths, 1)]
