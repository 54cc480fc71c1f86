# SPDX-License-Identifier: Apache-2.0
"""Process a dataset with any number of workers, of any speed, which may come, go and be killed at any time.

    export DATA_TOKEN=$(openssl rand -hex 16)
    python examples/dispatched_ranges.py serve --book /tmp/book --port 29700
    python examples/dispatched_ranges.py work --port 29700 --worker one --output /tmp/out
    python examples/dispatched_ranges.py work --port 29700 --worker two --output /tmp/out

Each range of the data ends in one file of the output. Kill a worker: the others do what it held. Kill the
server, and start it again on its book: the workers go on.
"""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path

from resiliency.data import DataClient, DataServer, SampleRanges, StaleRange
from resiliency.files import write_durably


def serve(options: argparse.Namespace) -> None:
    source = SampleRanges(size=options.size, range_size=options.range_size, dataset="squares")
    address = (options.host, options.port)
    with DataServer(source, options.book, token=os.environ["DATA_TOKEN"], address=address) as server:
        print(f"serving on port {server.address[1]}", flush=True)
        server.wait()


def work(options: argparse.Namespace) -> None:
    address, token = (options.host, options.port), os.environ["DATA_TOKEN"]
    with DataClient(address, options.worker, token=token) as client:
        for part in client.ranges():
            squares = "".join(f"{number} {number**2}\n" for number in range(part.start, part.stop))
            # First durable, then done. A range that is lost in between is written again, to the same file.
            write_durably(options.output / f"{part.start}.txt", squares.encode())
            try:
                client.done(part)
            except StaleRange:
                print(f"range {part} went to another worker", flush=True)
    print(f"worker {options.worker}: the data end", flush=True)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    server, worker = commands.add_parser("serve"), commands.add_parser("work")
    for command in (server, worker):
        command.add_argument("--host", default="127.0.0.1")
        command.add_argument("--port", type=int, required=True)
    server.add_argument("--book", required=True)
    server.add_argument("--size", type=int, default=10_000)
    server.add_argument("--range-size", type=int, default=100)
    server.set_defaults(run=serve)
    worker.add_argument("--worker", required=True)
    worker.add_argument("--output", type=Path, required=True)
    worker.set_defaults(run=work)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
