"""The page that compares stretto with other frameworks: a table, a picture, versions and the date."""

from datetime import date
from html import escape
from pathlib import Path

from peer_scripts.case import Case

Results = dict[str, dict[str, float | str]]
BASE = "torch, one rank"
OURS = "stretto, 2 ranks"
OTHER_MODEL = "xlstm (mLSTM)"
THREADS = "torch, 2 threads, one rank"
NOT_DRAWN = (OTHER_MODEL, "torch, packed rows")  # they have only one case
# The picture: width of the labels, of a case and of its longest bar; height of the title and of a row.
LEFT, PANEL, BAR, TOP, ROW = 190, 150, 100, 30, 20
DDP_PEERS = tuple(f"{name}, 2 ranks" for name in ("torch", "torch, tuned", "Lightning", "Accelerate"))


def write_page(
    path: Path,
    cases: dict[str, Case],
    results: Results,
    notes: dict[str, str],
    versions: list[str],
    day: date,
) -> None:
    """Write the page, and its picture beside it. `notes` says for each case which layout stretto has chosen."""
    picture = path.with_suffix(".svg")
    picture.write_text(draw(results))
    labels = _labels(results)
    lines = [
        "# Speed comparison",
        "",
        f"The same training step in stretto and in other frameworks, measured on {day:%d %B %Y} by "
        "`python benchmarks/peers.py` on a machine with two cores and no GPU. Each rank has one thread (except in "
        f"*{THREADS}*). The frameworks take turns; meanwhile the others are paused, except TensorFlow on two ranks, "
        "whose heartbeats must continue. Ranks are connected by gloo, those of TensorFlow by gRPC. "
        f"All train the same weights on the same batch, and their losses agree; only {OTHER_MODEL} is another model.",
        "",
        "- *stretto* runs in the layout that `choose_layout` picks. On CPUs it keeps the memory that its steps free, "
        "flushes denormals to zero, and its tensors are time-major.",
        "- *torch* is what most scripts do: batch first, `DistributedDataParallel` with its defaults. *torch, tuned* "
        "has the settings of stretto, with `gradient_as_bucket_view`; rows of unequal lengths are sorted into four "
        "groups, each padded to its own longest row.",
        "- *torch pipelining* has the number of micro-batches that is fastest in a trial: 2, 4 or 8.",
        "- *stretto* is timed as `engine.step` with the optimizer's step, *Lightning* as a step of its `Trainer`, and "
        "*Keras* as `train_on_batch`; the others are loops by hand.",
        "- Contenders that take more than three times as long as the fastest have only two timed rounds, the others "
        "ten; torch on one rank always has ten.",
        "",
        "On both cores, how many times as fast as torch on one rank:",
        "",
        f"![Bars for each case: stretto and other frameworks on two cores]({picture.name})",
        "",
        "Seconds per step (median), and how many times as fast as torch on one rank:",
        "",
        f"| | {' | '.join(results)} |",
        f"|---|{'---|' * len(results)}",
    ]
    for label in labels:
        cells = [_cell(measured.get(label), measured[BASE]) for measured in results.values()]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    lines += [
        "",
        "A dash: the framework's script in `benchmarks/peer_scripts` does not have this case. That of Keras on torch "
        "has neither bidirectional layers nor rows of unequal lengths.",
    ]
    lines += ["", "What the cases are:", ""]
    for name, case in cases.items():
        kind = "bidirectional LSTM" if case.is_bidirectional else "LSTM"
        inputs = f", a vocabulary of {case.vocabulary:,}" if case.vocabulary else ""
        steps = f"{case.shortest} to {case.steps}" if case.shortest else str(case.steps)
        model = f"{case.layers} {kind} layers, H={case.hidden}{inputs}"
        padding = (
            "; the other frameworks pad shorter rows, which is exact for an LSTM that reads only forward"
            if case.shortest
            else ""
        )
        lines.append(f"- {name}: {case.rows} rows x {steps} time steps, {model}{padding}")
    lines += ["", "Who is fastest:", ""]
    lines += [_winner(name, results[name], notes[name]) for name in results]
    lines += ["", f"Versions: {', '.join(versions)}.", ""]
    path.write_text("\n".join(lines))


def _labels(results: Results) -> list[str]:
    """Return all labels once, each after the one that it follows in its case."""
    labels: list[str] = []
    for measured in results.values():
        place = 0
        for label in measured:
            if label not in labels:
                labels.insert(place, label)
            place = labels.index(label) + 1
    return labels


def _winner(name: str, measured: dict[str, float | str], layout: str) -> str:
    """Say who is fastest in a case: all that are faster than stretto on two ranks, and why."""
    seconds = {
        label: value
        for label, value in measured.items()
        if not isinstance(value, str) and not label.startswith(OTHER_MODEL)
    }
    if OURS not in seconds:
        return f"- **{name}**: stretto on two ranks has no figure."
    ours = seconds[OURS]
    faster = sorted((label for label in seconds if seconds[label] < ours), key=seconds.__getitem__)
    if not faster:
        return f"- **{name}**: {OURS} is fastest. stretto's layout is {layout}."
    names = " and ".join(f"*{label}* ({seconds[label]:.3f} s)" for label in faster)
    result = (
        f"{names} {'are' if len(faster) > 1 else 'is'} faster than stretto on two ranks ({ours:.3f} s), which takes "
        f"{ours / seconds[faster[0]]:.2f} times as long as the fastest."
    )
    same_layout = [f"*{label}*" for label in faster if label in DDP_PEERS] if layout == "2 replicas" else []
    if THREADS in faster:
        result += (
            f" The two threads of *{THREADS}* share the weights, so they exchange no gradients; this works only on one "
            "machine."
        )
    if same_layout:
        result += (
            f" {' and '.join(same_layout)} {'run' if len(same_layout) > 1 else 'runs'} DDP with half of the rows on "
            "each rank, as stretto does: the difference is overhead of a step, and noise."
        )
    return f"- **{name}**: {result} stretto's layout is {layout}."


def _cell(value: float | str | None, base: float | str) -> str:
    if value is None or isinstance(value, str):
        return value or "-"
    return f"{value:.3f}" if isinstance(base, str) else f"{value:.3f} ({base / value:.2f}x)"


def draw(results: Results) -> str:
    """Draw how many times as fast as torch on one rank each contender on two cores is: a column of bars per case."""
    labels = [label for label in _labels(results) if label == THREADS or label.endswith("2 ranks")]
    labels = [label for label in labels if not label.startswith(NOT_DRAWN)]
    speeds = {
        name: {label: _speed(measured.get(label), measured[BASE]) for label in labels}
        for name, measured in results.items()
    }
    fastest = max(speed for column in speeds.values() for speed in column.values()) or 1.0  # 0 if nothing has a base
    width, height = LEFT + PANEL * len(speeds), TOP + ROW * len(labels) + 10
    parts = [f'<rect width="{width}" height="{height}" fill="#fff"/>']
    for row, label in enumerate(labels):
        y = TOP + ROW * row
        parts.append(f'<text x="{LEFT - 8}" y="{y + 13}" text-anchor="end">{escape(label)}</text>')
        for column, (name, column_speeds) in enumerate(speeds.items()):
            x, bar = LEFT + PANEL * column, BAR * column_speeds[label] / fastest
            if row == 0:
                parts.append(f'<text x="{x}" y="{TOP - 10}" font-weight="bold">{escape(name)}</text>')
            fill = "#d9480f" if label.startswith("stretto") else "#74889c"
            parts.append(f'<rect x="{x}" y="{y + 2}" width="{bar:.1f}" height="14" fill="{fill}"/>')
            parts.append(f'<text x="{x + bar + 5:.1f}" y="{y + 13}">{column_speeds[label]:.2f}x</text>')
    style = "font-family:system-ui,sans-serif;font-size:12px;fill:#333"
    box = f'viewBox="0 0 {width} {height}" style="{style}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box}>{"".join(parts)}</svg>\n'


def _speed(value: float | str | None, base: float | str) -> float:
    """Return how many times as fast as the baseline; 0 for what was not measured."""
    return 0.0 if value is None or isinstance(value, str) or isinstance(base, str) else base / value
