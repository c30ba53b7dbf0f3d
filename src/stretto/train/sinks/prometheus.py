"""Prometheus: serves the newest values at http://127.0.0.1:PORT/metrics while the run lasts."""

import errno
import re
import time
from collections.abc import Mapping
from pathlib import Path
from threading import Thread
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Gauge, start_http_server

from stretto.base.errors import ConfigError
from stretto.train.sinks.sink import RunStatus, Scalar, Sink, iter_scalars
from stretto.train.sinks.state import SinkState

# How long to wait for the port of an earlier launch that was killed: its data workers hold the port until they exit.
_PORT_TIMEOUT_SECONDS = 15.0


class PrometheusSink(Sink):
    """A gauge per value: `stretto_loss` (of a step), `stretto_evaluation_loss`, `stretto_ranks_busy{rank="0"}`, ..."""

    def __init__(self, port: int, folder: Path) -> None:
        state = SinkState(folder)
        is_own_port = state.read("prometheus") == str(port)  # an earlier launch used it
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        deadline = time.monotonic() + (_PORT_TIMEOUT_SECONDS if is_own_port else 0.0)
        self._server, self._thread = _listen(port, self._registry, deadline)
        try:
            state.write("prometheus", str(port))
        except OSError:
            self.close("failed")
            raise

    def write(self, kind: str, values: Mapping[str, object]) -> None:
        for scalar in iter_scalars(kind, values):
            gauge = self._gauge(scalar)
            (gauge if scalar.rank is None else gauge.labels(scalar.rank)).set(scalar.value)

    def close(self, status: RunStatus) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _gauge(self, scalar: Scalar) -> Gauge:
        kind = "" if scalar.kind == "step" else f"_{scalar.kind}"
        name = re.sub(r"\W", "_", f"stretto{kind}_{scalar.name}", flags=re.ASCII)
        if name not in self._gauges:
            description = f"{scalar.name} in the newest {scalar.kind!r} line of the log"
            labels = () if scalar.rank is None else ("rank",)
            self._gauges[name] = Gauge(name, description, labels, registry=self._registry)
        return self._gauges[name]


def _listen(port: int, registry: CollectorRegistry, deadline: float) -> tuple[WSGIServer, Thread]:
    """Listen on the loopback address once the port is free; raise ConfigError after the deadline or on other errors."""
    while True:
        try:
            return start_http_server(port, addr="127.0.0.1", registry=registry)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                reason = error.strerror or str(error)
                raise ConfigError(
                    f"can't listen on logging.prometheus_port={port} ({reason}); choose a different port"
                ) from None
        time.sleep(0.2)
