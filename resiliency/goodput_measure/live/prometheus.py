# SPDX-License-Identifier: Apache-2.0
"""Goodput in Prometheus' text format: as a file for the node exporter, or over HTTP."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from resiliency.errors import ConfigError
from resiliency.goodput_measure.live.figures import LiveFigures
from resiliency.goodput_measure.reliability import reliability_of
from resiliency.goodput_measure.what_if import interval_costs, save_model
from resiliency.prometheus import CONTENT_TYPE, Metric, Sample, to_text

_PREFIX = "resiliency_goodput_"
#: All are gauges: a kept step may be lost later.
_METRICS = (
    Metric("ratio", "gauge", "Kept steps as a part of all rank time."),
    Metric("window_ratio", "gauge", "The same over the newest window."),
    Metric("ettr", "gauge", "Part of wall time with a kept step on any rank."),
    Metric("rank_seconds", "gauge", "Rank time by cause; adds up to wall time x ranks."),
    Metric("wall_seconds", "gauge", "From the first event of the job to its end, or to now."),
    Metric("ranks", "gauge", "Ranks that the job ever had."),
    Metric("incidents", "gauge", "Interruptions so far."),
    Metric("mttf_seconds", "gauge", "Mean time of training to a failure."),
    Metric("mttr_seconds", "gauge", "Mean time from a failure to the first new step."),
    Metric(
        "save_interval_steps", "gauge", "Steps between saves: the job's own, and what would have cost least."
    ),
)


def as_metrics(jobs: Iterable[LiveFigures]) -> str:
    """A value that is not known is left out."""
    return to_text(_PREFIX, _METRICS, (sample for job in jobs for sample in _samples(job)))


def _samples(job: LiveFigures) -> Iterator[Sample]:
    name = {"job": job.job_name}
    found, saves = reliability_of(job), save_model(job)
    yield "ratio", name, job.goodput
    yield "window_ratio", {**name, "window": f"{job.window_us / 1e6:g}s"}, job.window_goodput
    yield "ettr", name, job.ettr
    for bucket, total in job.totals.items():
        yield "rank_seconds", {**name, "cause": bucket.value}, total / 1e6
    yield "wall_seconds", name, job.wall_us / 1e6
    yield "ranks", name, job.ranks
    yield "incidents", name, len(job.incidents)
    yield "mttf_seconds", name, found.mttf_s
    yield "mttr_seconds", name, found.mttr_s
    for cost in () if saves is None else interval_costs(saves):
        for which in ("as it was", "best"):
            if which in cost.note:
                yield "save_interval_steps", {**name, "which": which.replace(" ", "_")}, cost.interval_steps


def write_metrics(text: str, path: str | os.PathLike[str]) -> None:
    """Replace the file in one step: a scrape sees the old or the new one, and no part of either.

    Raises:
        ConfigError: it cannot be written.
    """
    target = Path(path)
    part = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        part.write_text(text)
        part.replace(target)
    except OSError as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise ConfigError(
            f"cannot write --prometheus {str(target)!r}: {error.strerror}.", path=str(target)
        ) from error


class MetricsServer:
    """Answers GET /metrics with the newest text.  `port`: the one that it listens on."""

    def __init__(self, address: str, port: int) -> None:
        self.text = ""
        served = self

        class MetricsHandler(BaseHTTPRequestHandler):
            timeout = 10  # a client that says nothing keeps no thread

            def do_GET(self) -> None:
                if self.path.partition("?")[0] not in ("/", "/metrics"):
                    self.send_error(404)
                    return
                body = served.text.encode()
                self.send_response(200)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Scrapes are no news."""

        try:
            self._server = ThreadingHTTPServer((address, port), MetricsHandler)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"cannot listen on --prometheus-port {port} of {address}: {error}.") from error
        self.port = int(self._server.server_address[1])


@contextmanager
def serving(port: int, address: str = "127.0.0.1") -> Iterator[MetricsServer]:
    """A metrics server for as long as the block runs.

    Args:
        port: 0 chooses a free one.
        address: to listen on; there is no login.
    Raises:
        ConfigError: the port is taken, or there is no such address.
    """
    server = MetricsServer(address, port)
    thread = threading.Thread(target=server._server.serve_forever, name="goodput-metrics", daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server._server.shutdown()
        server._server.server_close()
        thread.join(timeout=10)
