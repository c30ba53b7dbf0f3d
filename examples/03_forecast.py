"""Forecast the oil temperature of a power transformer, 24 hours ahead, from 96 hours of seven channels.

python examples/03_forecast.py [ETTh1.csv]    # writes data/ett and forecast.svg
"""

import sys
from pathlib import Path

import torch
from torch import Tensor

import stretto
from stretto import nn
from stretto.data import Batches, ForecastTransform, Sequences, SeriesOptions, SlidingWindows, prepare_series

# A table with one row per hour becomes a store of series; the last fifth is for validation.
if not Path("data/ett").exists():
    beside = Path(__file__).resolve().parents[2] / "shared" / "data" / "ett" / "ETTh1.csv"
    if not sys.argv[1:] and not beside.exists():
        sys.exit("pass the path of ETTh1.csv, from the ETT datasets of zhouhaoyi/ETDataset on GitHub")
    prepare_series(sys.argv[1:] or [beside], "data/ett", SeriesOptions(time="date", validation_fraction=0.2))
train, valid = (Sequences.open(f"data/ett/{part}") for part in ("train", "valid"))

# The target is the difference to the day before: a network that outputs zeros repeats the last day.
forecast = ForecastTransform.from_sequences(train, horizon=24, season=24, targets=["OT"])
train_items = SlidingWindows(train, forecast, context=96, every_step=True)
valid_items = SlidingWindows(valid, forecast, context=96)  # one target, at the last step

task = forecast.task
model = nn.Stack([nn.LSTM(task.num_inputs, 64), nn.Linear(64, task.num_outputs)])
engine = stretto.make_engine(model, nn.SquaredError(), seed=1)
trainer = stretto.Trainer(engine, Batches(train_items, budget=6144), stretto.TrainConfig(steps=400, lr=2e-3))

for report in trainer:
    if report.step % 100 == 0:
        print(f"step {report.step}  loss {report.loss:.4f}  {report.seconds * 1000:.0f} ms")

# Both errors are over the same validation windows, in standard deviations of the channel.
scores = stretto.evaluate(engine, Batches(valid_items, budget=6144))
row_ids = [(0, number) for number in range(valid_items.shard_sizes[0])]  # (shard, row): there is one shard
targets = valid_items.read(row_ids, 96, inputs=False, targets=True)[1]
assert targets is not None
print(f"validation: squared error {scores.loss:.4f}, repeating the last day {float(targets[-1].square().mean()):.4f}")


def draw(lines: dict[str, tuple[str, Tensor]]) -> str:
    """Return an SVG with a panel for each row of the lines [rows, hours]; all of them end at hour 72."""
    low, high = (float(limit) for limit in torch.cat([values for _, values in lines.values()], dim=1).aminmax())
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1020 300" font-family="sans-serif" font-size="12">']
    parts += ['<rect width="1020" height="300" fill="white"/><g fill="#333">']
    parts += ['<text x="40" y="24" font-size="14">Oil temperature, °C: three validation windows</text>']
    for degrees in range(5 * round(low / 5), int(high) + 1, 5):
        y = 250 - 190 * (degrees - low) / (high - low)
        parts += [f'<text x="32" y="{y + 4:.1f}" text-anchor="end">{degrees}</text>']
        parts += [f'<path d="M40 {y:.1f}H992" stroke="#e4e4e4"/>']
    for panel, left in enumerate((40, 372, 704)):
        parts += [f'<rect x="{left + 192}" y="50" width="96" height="206" fill="#d1690e" opacity="0.07"/>']
        parts += [f'<text x="{left + 4 * h}" y="274" text-anchor="middle">{h - 48}</text>' for h in range(0, 73, 24)]
        for style, values in lines.values():
            level = 250 - 190 * (values[panel] - low) / (high - low)
            first = 73 - len(level)
            points = " ".join(f"{left + 4 * (first + hour)},{y:.1f}" for hour, y in enumerate(level.tolist()))
            parts += [f'<polyline points="{points}" fill="none" stroke-width="2" {style}/>']
    for left, (name, (style, _)) in zip((640, 760, 910), lines.items(), strict=True):
        parts += [f'<path d="M{left} 20h28" stroke-width="2" {style}/><text x="{left + 34}" y="24">{name}</text>']
    parts += ['<text x="516" y="292" text-anchor="middle">hours after the forecast is made</text></g></svg>']
    return "\n".join(parts)


quarter = len(row_ids) // 4
x, targets = valid_items.read(row_ids[quarter::quarter][:3], 96, inputs=True, targets=True)
assert x is not None and targets is not None
with torch.no_grad():
    y, _ = model(x, model.begin(nn.Rows.of(num_rows=3)))
(channel,) = forecast.target_channels
mean, std = forecast.mean[channel], forecast.std[channel]
days = mean + std * x[-48:, :, channel].T  # [rows, hours]: the two days before
picture = draw(
    {
        "measured": ('stroke="#555"', torch.cat([days, days[:, -24:] + std * targets[-1]], dim=1)),
        "last day again": ('stroke="#4c8bf5" stroke-dasharray="4 3"', days[:, -24:]),
        "forecast": ('stroke="#d1690e"', days[:, -24:] + std * y[-1]),
    }
)
Path("forecast.svg").write_text(picture, encoding="utf-8")
