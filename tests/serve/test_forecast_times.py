"""Forecasts of a file have the times of their time steps, written as in the file."""

import csv
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from stretto.cli.main import main
from stretto.serve.series_times import format_timestamp, times_after
from stretto.store.index import INDEX


def write_load(path: Path, num_hours: int, start: datetime) -> None:
    hours = [(start + timedelta(hours=hour), hour % 24) for hour in range(num_hours)]
    lines = [f"{site};{time:%d.%m.%Y %H:%M};{load}" for site in "ab" for time, load in hours]
    path.write_text("site;when;load\n" + "\n".join(lines) + "\n")


def test_the_forecast_of_a_file_names_the_times_in_its_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_load(Path("load.csv"), 120, datetime(2025, 12, 26, 15))
    options = ["--kind", "series", "--by", "site", "--time", "when", "--horizon", "3", "--context", "8", "--yes"]
    assert main(["init", "load.csv", *options]) == 0
    assert main(["train", "run.toml", "--train.steps", "1"]) == 0
    capsys.readouterr()
    assert main(["forecast", "runs/load", "--data", "load.csv", "--out", "next.csv"]) == 0
    assert "31.12.2025 15:00" in capsys.readouterr().out
    rows = list(csv.DictReader(Path("next.csv").read_text().splitlines()))
    assert list(rows[0]) == ["series", "step", "time", "load"] and len(rows) == 6
    assert [row["time"] for row in rows] == ["31.12.2025 15:00", "31.12.2025 16:00", "31.12.2025 17:00"] * 2
    # A store has no times.
    assert Path(f"data/load/valid/{INDEX}").exists()
    assert main(["forecast", "runs/load", "--out", "stored.csv"]) == 0
    assert Path("stored.csv").read_text().startswith("series,step,load")


def test_times_are_continued_only_at_a_regular_interval() -> None:
    days = [datetime(2025, 1, 1) + timedelta(days=day) for day in range(50)]
    assert times_after(days, 50, 2) == [datetime(2025, 2, 20), datetime(2025, 2, 21)]
    assert times_after(days, 45, 2) == days[45:47], "the rows of a known future have times"
    assert times_after(days, 49, 2) == [days[49], datetime(2025, 2, 20)]
    working_days = [day for day in days if day.weekday() < 5]
    assert times_after(working_days, len(working_days), 2) == []
    assert times_after([1.0, 1.5, 2.0], 3, 2) == [2.5, 3.0]
    assert times_after([datetime(2025, 1, 1)] * 24, 24, 2) == times_after([3.0] * 4, 4, 2) == [], "hours without hours"
    assert times_after([], 0, 2) == times_after([1.0], 1, 2) == []
    assert times_after([1.0, datetime(2025, 1, 1)], 2, 1) == []
    assert [format_timestamp(time, None) for time in (2.5, days[0])] == ["2.5", "2025-01-01 00:00:00"]
