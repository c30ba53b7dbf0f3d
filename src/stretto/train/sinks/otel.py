"""OpenTelemetry: pushes gauges of the run, and histograms over the ranks of a node, to a collector over OTLP/HTTP."""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from stretto.base.fingerprint import fingerprint
from stretto.base.metric_names import PER_CLASS
from stretto.mesh.node import node_name, node_number
from stretto.train.sinks.sink import NODE, RunStatus, Scalar, Sink, iter_scalars

if TYPE_CHECKING:
    from stretto.train.sinks.otlp_metrics import OtlpMetrics

_SECONDS = tuple(digit * 10.0**exponent for exponent in range(-3, 3) for digit in (1, 2, 5))  # 1 ms to 500 s
_BYTES = tuple(2.0**exponent for exponent in range(26, 39))  # 64 MiB to 256 GiB
_STRAGGLER = "straggler"
_MAX_NAME_LENGTH = 255  # OpenTelemetry's limit


class _Histogram(NamedTuple):
    name: str
    unit: str
    bounds: Sequence[float]  # of its buckets


# By field of a NodeReport.
_HISTOGRAMS = {
    "seconds": _Histogram("stretto.rank.step.duration", "s", _SECONDS),
    "busy": _Histogram("stretto.rank.busy.duration", "s", _SECONDS),
    "waiting": _Histogram("stretto.rank.waiting.duration", "s", _SECONDS),
    "data": _Histogram("stretto.rank.data.duration", "s", _SECONDS),
    "memory": _Histogram("stretto.rank.memory", "By", _BYTES),
}


class OtelSink(Sink):
    """A gauge per value, named as in Prometheus, and histograms over a node's ranks instead of a series per rank.

    The scores of a class have the attribute `class`. Only the straggler has its rank as an attribute, while it is one.
    """

    is_per_node = True
    wake_seconds = 1.0

    def __init__(self, endpoint: str, folder: Path) -> None:
        # In this thread: a data worker that is forked during an import in another thread could wait for it forever.
        from stretto.train.sinks.otlp_metrics import OtlpMetrics

        self._open_metrics = partial(OtlpMetrics, endpoint, _describe_source(folder))
        self._metrics: OtlpMetrics | None = None
        self._is_opened = False

    def write(self, kind: str, values: Mapping[str, object]) -> None:
        if not self._is_opened:
            self._is_opened = True  # once: what can't be opened would fail again for each line
            self._metrics = self._open_metrics()
        if self._metrics is None:
            return
        if kind == NODE:
            _record_node(self._metrics, values)
        else:
            _record_line(self._metrics, kind, values)
        self._metrics.push_if_due()

    def wake(self) -> None:
        if self._metrics is not None:
            self._metrics.push_if_due()

    def close(self, status: RunStatus) -> None:
        if self._metrics is not None:
            self._metrics.close(tries_again=status == "finished")


def _record_node(metrics: "OtlpMetrics", values: Mapping[str, object]) -> None:
    for field, histogram in _HISTOGRAMS.items():
        figures = values[field]
        assert isinstance(figures, tuple)
        metrics.record(histogram.name, histogram.unit, histogram.bounds, figures)
    ranks = values["ranks"]
    assert isinstance(ranks, tuple)
    metrics.set_gauge("stretto.node.first_rank", ranks[0])
    metrics.set_gauge("stretto.node.num_ranks", len(ranks))


def _record_line(metrics: "OtlpMetrics", kind: str, values: Mapping[str, object]) -> None:
    straggler, table = values.get(_STRAGGLER), values.get(PER_CLASS)
    for scalar in iter_scalars(kind, {name: values[name] for name in values if name not in (_STRAGGLER, PER_CLASS)}):
        if scalar.rank is None:
            metrics.set_gauge(_metric_name(scalar), scalar.value)
    for class_name, scores in table.items() if isinstance(table, Mapping) else ():
        for scalar in iter_scalars(f"{kind}.{PER_CLASS}", scores):
            metrics.set_gauge(_metric_name(scalar), scalar.value, ("class", class_name))
    if kind == "ranks":
        for name in ("seconds", "since"):
            metrics.clear_gauge(f"stretto.straggler.{name}")
            if isinstance(straggler, Mapping):
                metrics.set_gauge(f"stretto.straggler.{name}", float(straggler[name]), ("rank", str(straggler["rank"])))


def _metric_name(scalar: Scalar) -> str:
    kind = "" if scalar.kind == "step" else f"{scalar.kind}."
    return re.sub(r"[^-.\w]", "_", f"stretto.{kind}{scalar.name}", flags=re.ASCII)[:_MAX_NAME_LENGTH]


def _describe_source(folder: Path) -> dict[str, str]:
    """Return OpenTelemetry's resource attributes of this node's part of the run."""
    run_id = fingerprint(str(folder.resolve()))[:16]  # the same for all nodes and launches
    return {
        "service.name": "stretto",
        # The series of different instances are kept apart, also if a backend drops the other attributes.
        "service.instance.id": f"{run_id}.{node_number():x}",
        "host.name": node_name(),
        "stretto.run.id": run_id,
        "stretto.run.name": folder.resolve().name,
    }
