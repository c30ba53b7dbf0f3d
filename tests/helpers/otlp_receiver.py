"""OtlpReceiver: a collector for tests. It decodes the requests with OpenTelemetry's own protobuf classes."""

import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import HistogramDataPoint, Metric, NumberDataPoint


@dataclass(frozen=True)
class Push:
    """One request."""

    path: str
    headers: dict[str, str]  # their names in lower case
    resource: dict[str, str]
    metrics: dict[str, Metric]

    def gauges(self) -> dict[str, float]:
        """The value of each gauge that has no attributes."""
        points = {name: list(metric.gauge.data_points) for name, metric in self.metrics.items()}
        return {name: number(found[0]) for name, found in points.items() if found and not found[0].attributes}

    def labeled(self) -> dict[str, list[tuple[dict[str, str], float]]]:
        """The points of each gauge whose points have attributes."""
        points = {name: metric.gauge.data_points for name, metric in self.metrics.items()}
        return {
            name: [(texts(point.attributes), number(point)) for point in found]
            for name, found in points.items()
            if any(point.attributes for point in found)
        }

    def histograms(self) -> dict[str, HistogramDataPoint]:
        points = {name: metric.histogram.data_points for name, metric in self.metrics.items()}
        assert all(len(found) <= 1 for found in points.values()), "one series per node"
        return {name: found[0] for name, found in points.items() if found}


def texts(attributes: "list[KeyValue]") -> dict[str, str]:
    return {one.key: one.value.string_value for one in attributes}


def number(point: NumberDataPoint) -> float:
    return point.as_double if point.WhichOneof("value") == "as_double" else point.as_int


class OtlpReceiver:
    """Listens on loopback, and answers each request with the same status."""

    def __init__(self, status: int = 200, port: int = 0) -> None:
        self.pushes: list[Push] = []
        pushes = self.pushes

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                request = ExportMetricsServiceRequest.FromString(body)
                headers = {name.lower(): value for name, value in self.headers.items()}
                for part in request.resource_metrics:
                    metrics = {metric.name: metric for scope in part.scope_metrics for metric in scope.metrics}
                    pushes.append(Push(self.path, headers, texts(list(part.resource.attributes)), metrics))
                self.send_response(status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Print nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def newest(self, host: str) -> Push:
        """The last push of a node."""
        return [push for push in self.pushes if push.resource["host.name"] == host][-1]
