# SPDX-License-Identifier: Apache-2.0
"""The rendezvous store as a process of its own: ``python3 -m resiliency.launch.rendezvous_store``.

By default the first host of a job serves the store in which its launchers meet, and a job ends when that host
is lost.  With this process on a host that does not train, the first host is no different from another one.

It keeps what launchers write in memory only.  When it is started again, with nothing in it, launchers connect
again and put back what they need (`reconnecting_store`).
"""

from __future__ import annotations

import argparse
import logging
import resource
import signal
import socket
import sys
from collections.abc import Sequence

from resiliency import log
from resiliency.errors import ConfigError
from resiliency.files import ALIVE_PERIOD_S, touch_alive_file
from resiliency.launch.cli import RefusingParser
from resiliency.runtime import RunInfo

# As a program, the name of this module is __main__.
logger = logging.getLogger("resiliency.launch.rendezvous_store")

REFUSED = 2
#: Where torchrun's launchers look when an endpoint has no port.
DEFAULT_PORT = 29400
PROGRAM = "rendezvous_store"
DESCRIPTION = """\
Serve the store in which the launchers of jobs meet, from a host that does not train.

Start it once, on a CPU host, before the launchers.  One process serves many jobs: each has its own
--rdzv-id.  It may be stopped and started again at any time: ranks go on meanwhile, and a restart of
ranks that falls into the gap waits for it."""
EPILOG = """\
example:
  on the CPU host store1:
    python3 -m resiliency.launch.rendezvous_store --port 29400

  on every training host:
    python3 launcher.py --nnodes 2 --nproc-per-node 8 --max-restarts 3 --rdzv-backend c10d \\
        --rdzv-endpoint store1:29400 --rdzv-conf is_host=0 --rdzv-id llama train.py

exit codes: 0 ended by SIGTERM or SIGINT; 2 refused, nothing was served."""


def build_parser() -> argparse.ArgumentParser:
    """The parser of this program's flags."""
    parser = RefusingParser(
        prog=PROGRAM,
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help=f"Where it listens ({DEFAULT_PORT}); 0: a free port."
    )
    parser.add_argument(
        "--host",
        default="",
        metavar="ADDRESS",
        help="Address of the interface on which it listens; default: all.  Whoever reaches the port can take "
        "part in every job's rendezvous, and run code in its launchers: let only training hosts reach it.",
    )
    return parser


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port must be 0 to 65535, found {port}.", flag="--port")
    try:
        if not host and socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigError(
            f"cannot listen at {host or 'all interfaces'}, port {port}: {error.strerror}.",
            hint="Another rendezvous store, or a launcher that serves its own, may run here.",
            flag="--port",
        ) from error


def serve_until_signal(host: str, port: int) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        ConfigError: it cannot listen there, or touch the file for probes.
    """
    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # before torch starts threads, which inherit the mask
    listener = _listen(host, port)
    port = listener.getsockname()[1]
    # Each launcher holds one connection.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # After all that can be refused without it.
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from resiliency.launch.rendezvous.reconnecting_store import BY_PROCESS, SERVED_BY

    store = TCPStore(
        host or "localhost",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        use_libuv=True,
    )
    store.set(SERVED_BY, BY_PROCESS)
    touch_alive_file()
    logger.info("rendezvous store listens at %s, port %d", host or "all interfaces", port)
    while (end := signal.sigtimedwait(ends, ALIVE_PERIOD_S)) is None:
        store.get(SERVED_BY)  # by its own port, as launchers ask
        touch_alive_file()
    logger.info("rendezvous store ends: %s", signal.Signals(end.si_signo).name)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the store with `argv` (default: the process's own) and return its exit code."""
    try:
        args = build_parser().parse_args(argv)
        log.configure(RunInfo(job_name="rendezvous-store", host=RunInfo.from_env().host))
        serve_until_signal(args.host, args.port)
    except ConfigError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main())
