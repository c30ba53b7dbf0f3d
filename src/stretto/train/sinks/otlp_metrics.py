"""OtlpMetrics: gauges and histograms that OpenTelemetry's SDK pushes to a collector over OTLP/HTTP.

The SDK reads the standard variables OTEL_EXPORTER_OTLP_* (headers, certificates, compression, timeout, temporality) and
OTEL_RESOURCE_ATTRIBUTES itself. Headers may be secret: this module never sees them.
"""

import errno
import logging
import math
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.metrics import CallbackOptions, Histogram, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricExportResult, MetricsData, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import OTELResourceDetector, Resource

from stretto.base.remote import without_secrets
from stretto.config.logging import AUTO

_DEFAULT_ENDPOINT, _PATH = "http://localhost:4318", "v1/metrics"
_DEFAULT_INTERVAL_MILLISECONDS = "60000"  # as the standard says
_MAX_REASON_LENGTH = 100
# The logs of the exporter, and of the parser of headers, whose messages have the headers in them.
_EXPORTER_LOG, _HEADER_LOG = OTLPMetricExporter.__module__, "opentelemetry.util.re"
_LOGS = (_EXPORTER_LOG, _HEADER_LOG)


class OtlpMetrics:
    """Gauges and histograms, and their connection to a collector. All calls must be from one thread.

    `attributes` describe who pushes; those in the environment replace them. The SDK's own reader would push from a
    second thread, which it starts again in forked processes, such as data workers; here `push_if_due` does so.
    """

    def __init__(self, endpoint: str, attributes: Mapping[str, str]) -> None:
        url = find_url(endpoint)
        self._shown_url = without_secrets(url)
        self._log_filter = _LogFilter()
        self._log_filter.install()
        self._exporter = _Exporter(endpoint=url)
        if self._log_filter.has_invalid_header:
            self._log_filter.remove()
            raise ValueError("OTEL_EXPORTER_OTLP_HEADERS has a header that is not name=value")
        self._reader = PeriodicExportingMetricReader(self._exporter, export_interval_millis=math.inf)
        resource = Resource.create(dict(attributes)).merge(OTELResourceDetector().detect())
        self._provider = MeterProvider([self._reader], resource, shutdown_on_exit=False)
        self._meter = self._provider.get_meter("stretto")
        self._interval = float(os.environ.get("OTEL_METRIC_EXPORT_INTERVAL") or _DEFAULT_INTERVAL_MILLISECONDS) / 1000
        self._next_push = 0.0
        self._gauges: dict[str, float] = {}
        self._histograms: dict[str, Histogram] = {}
        # Gauges with attributes, which may no longer be true at the next push.
        self._points: Mapping[str, float] = {}
        self._point_attributes: Mapping[str, str] = {}
        self._names: set[str] = set()

    def set_gauge(self, name: str, value: float) -> None:
        """Set the value of a gauge."""
        self._gauges[name] = value
        self._create_gauge(name)

    def set_points(self, points: Mapping[str, float], attributes: Mapping[str, str]) -> None:
        """Set the values of all gauges that have attributes; those set before are no longer pushed."""
        self._points, self._point_attributes = points, attributes
        for name in points:
            self._create_gauge(name)

    def record(self, name: str, unit: str, bounds: Sequence[float], values: Iterable[float]) -> None:
        """Add values to a histogram, whose buckets have these bounds unless the environment says otherwise."""
        if name not in self._histograms:
            self._histograms[name] = self._meter.create_histogram(
                name, unit, explicit_bucket_boundaries_advisory=bounds
            )
        for value in values:
            # A difference of two times may be a bit below zero, which histograms refuse.
            self._histograms[name].record(max(0.0, value))

    def push_if_due(self) -> None:
        """Push all metrics, at most once per OTEL_METRIC_EXPORT_INTERVAL; raise OSError if that fails."""
        if time.monotonic() >= self._next_push:
            try:
                self._push()
            finally:
                self._next_push = time.monotonic() + self._interval

    def close(self) -> None:
        """Push the last values, unless the last push failed, and disconnect."""
        try:
            if not self._exporter.has_failed:
                self._push()
        finally:
            self._provider.shutdown()
            self._log_filter.remove()

    def _push(self) -> None:
        self._exporter.has_failed = False
        self._log_filter.reason = "no answer"
        self._reader.collect()
        if self._exporter.has_failed:
            raise OSError(errno.EIO, f"can't push to {self._shown_url}: {self._log_filter.reason}")

    def _create_gauge(self, name: str) -> None:
        if name not in self._names:
            self._names.add(name)
            self._meter.create_observable_gauge(name, [partial(self._observe, name)])

    def _observe(self, name: str, options: CallbackOptions) -> Iterable[Observation]:
        if name in self._gauges:
            yield Observation(self._gauges[name])
        if name in self._points:
            yield Observation(self._points[name], self._point_attributes)


def find_url(endpoint: str) -> str:
    """Return the URL for metrics: of a collector's address, or of the environment's if `endpoint` is `auto`."""
    if endpoint == AUTO:
        url = os.environ.get("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT")
        if url:
            return url  # by the standard, as it is
        endpoint = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or _DEFAULT_ENDPOINT
    base = endpoint.rstrip("/")
    return base if base.endswith(f"/{_PATH}") else f"{base}/{_PATH}"


class _Exporter(OTLPMetricExporter):
    """Remembers whether the last export failed, which the SDK's reader does not tell."""

    has_failed = False

    def export(
        self,
        metrics_data: MetricsData,
        timeout_millis: float | None = None,
        **unused: object,  # as in the base class
    ) -> MetricExportResult:
        self.has_failed = True  # unless it returns
        result = super().export(metrics_data)
        self.has_failed = result is not MetricExportResult.SUCCESS
        return result


class _LogFilter(logging.Filter):
    """Keeps the SDK's messages of this thread out of the log, since the run warns once; remembers the last reason."""

    def __init__(self) -> None:
        super().__init__()
        self.reason = ""
        self.has_invalid_header = False
        self._thread = threading.get_ident()

    def install(self) -> None:
        for name in _LOGS:
            logging.getLogger(name).addFilter(self)

    def remove(self) -> None:
        for name in _LOGS:
            logging.getLogger(name).removeFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        if threading.get_ident() != self._thread:
            return True
        if record.name == _HEADER_LOG:
            self.has_invalid_header = True
            return False
        values = record.args if isinstance(record.args, tuple) else ()
        self.reason = " ".join(filter(None, map(_describe, values))) or self.reason
        return False


def _describe(value: object) -> str:
    """Return the part of a reason that is in an argument of a log message; empty if there is none."""
    if isinstance(value, Exception):
        return type(value).__name__  # its text may have the URL with a secret in it
    if isinstance(value, int) and value >= 100:  # smaller ones are delays
        return f"HTTP {value}"
    return value[:_MAX_REASON_LENGTH] if isinstance(value, str) and value != "metrics" else ""
