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

from stretto.base.redact import without_secrets
from stretto.config.logging import AUTO

_DEFAULT_ENDPOINT, _PATH = "http://localhost:4318", "v1/metrics"
_DEFAULT_INTERVAL_MILLISECONDS = 60_000.0  # as the standard says
_Attribute = tuple[str, str]  # its name and its value
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
        try:
            self._exporter = _Exporter(endpoint=url)
            if self._log_filter.has_invalid_header:
                raise ValueError("OTEL_EXPORTER_OTLP_HEADERS has a header that is not name=value")
        except BaseException:
            self._log_filter.remove()
            raise
        self._reader = PeriodicExportingMetricReader(self._exporter, export_interval_millis=math.inf)
        resource = Resource.create(dict(attributes)).merge(OTELResourceDetector().detect())
        self._provider = MeterProvider([self._reader], resource, shutdown_on_exit=False)
        self._meter = self._provider.get_meter("stretto")
        self._interval = _find_interval()
        self._next_push = 0.0
        self._gauges: dict[str, dict[_Attribute | None, float]] = {}
        self._histograms: dict[str, Histogram] = {}

    def set_gauge(self, name: str, value: float, attribute: _Attribute | None = None) -> None:
        """Set the value of a gauge; it has one per value of its attribute."""
        if name not in self._gauges:
            self._gauges[name] = {}
            self._meter.create_observable_gauge(name, [partial(self._observe, name)])
        self._gauges[name][attribute] = value

    def clear_gauge(self, name: str) -> None:
        """Push no value of a gauge until it is set again."""
        if name in self._gauges:
            self._gauges[name].clear()

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

    def close(self, *, tries_again: bool) -> None:
        """Push the last values and disconnect. If the last push failed, push only if `tries_again`."""
        try:
            if tries_again or not self._exporter.has_failed:
                self._push()
        finally:
            self._provider.shutdown()
            self._log_filter.remove()

    def _push(self) -> None:
        self._exporter.has_failed = False
        self._log_filter.reason = "no answer"
        self._reader.collect()
        if self._exporter.has_failed:
            problem = f"can't push to {self._shown_url}: {self._log_filter.reason}"
            raise OSError(errno.EIO, f"{problem}; check logging.otlp_endpoint and the collector")

    def _observe(self, name: str, options: CallbackOptions) -> Iterable[Observation]:
        for attribute, value in self._gauges[name].items():
            yield Observation(value, None if attribute is None else dict([attribute]))


def _find_interval() -> float:
    """Return the seconds between two pushes; if the variable is not a number, the default, as in the SDK."""
    try:
        return float(os.environ.get("OTEL_METRIC_EXPORT_INTERVAL") or _DEFAULT_INTERVAL_MILLISECONDS) / 1000
    except ValueError:
        return _DEFAULT_INTERVAL_MILLISECONDS / 1000


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
