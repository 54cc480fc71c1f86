# SPDX-License-Identifier: Apache-2.0
"""Why a launcher still waits for the rendezvous store, and where the other hosts reach this one.

torch waits for the store of the first host without a word, also where nothing that it waits for can happen:
another program listens at that port, or no host knows the name of another.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import psutil

from resiliency.runtime import addresses_of, interface_towards, is_loopback

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: What gloo takes for its connections instead of the host's own name.
GLOO_INTERFACE_ENV = "GLOO_SOCKET_IFNAME"
#: A store answers within milliseconds: after so long a person is told what is in the way, and again later.
_FIRST_LOOK_S, _NEXT_LOOK_S = 5.0, 15.0
#: How long the host that has to serve the store waits for another program to leave the port.
_TAKEN_S = 20.0
_CONNECT_S = 2.0


class InThread(Generic[T]):
    """A call in a thread of its own, so that a signal can interrupt the wait for it.

    Connecting to a host that is not up yet waits within native code, where no Python signal handler runs; a
    launcher could not be ended for minutes.
    """

    def __init__(self, function: Callable[[], T], *, name: str) -> None:
        self._function = function
        self._results: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._call, name=name, daemon=True)
        self._thread.start()

    def _call(self) -> None:
        try:
            self._results.append(self._function())
        except BaseException as error:
            self._error = error

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether it ended within this time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def result(self) -> T:
        """What it returned or raised, once it has."""
        self.wait()
        if self._error is not None:
            raise self._error
        return self._results[0]


def meet(connect: Callable[[], T], host: str, port: int, must_serve: Callable[[], bool]) -> T:
    """What `connect` returns; while it waits for the store at `host`, a line of the log says for what.

    Args:
        must_serve: whether this host has to serve the store; may look up names.
    Raises:
        OSError: it has to, and another program holds the port.
        Exception: what `connect` raises.
    """
    connecting = InThread(connect, name="rendezvous-connect")
    waited_s, look_s, said = 0.0, _FIRST_LOOK_S, ""
    while not connecting.wait(look_s):
        waited_s, look_s = waited_s + look_s, _NEXT_LOOK_S
        why, is_taken = InThread(lambda: _look(host, port, must_serve), name="rendezvous-look").result()
        if is_taken:
            why = (
                f"port {port} of this host is taken: {why}.  Give all hosts another port, or end that program"
            )
            if waited_s >= _TAKEN_S:
                raise OSError(f"{why}.")
        if why != said:
            logger.warning("no meeting at %s, port %d, after %.0f s: %s.", host, port, waited_s, why)
        said = why
    return connecting.result()


def _look(host: str, port: int, must_serve: Callable[[], bool]) -> tuple[str, bool]:
    """What is at an endpoint, and whether that is another program in the place of this host's own store."""
    found = addresses_of(host)
    if not found:
        return (
            f"this host does not know the name {host}: use an address, or a name that all hosts know",
            False,
        )
    refusals = []
    for address in found:
        try:
            socket.create_connection((address, port), timeout=_CONNECT_S).close()
        except OSError as error:
            refusals.append(f"{address}: {error.strerror or error}")
        else:
            return f"what listens at {address} does not answer as a rendezvous store does", must_serve()
    return f"nothing listens there that this host reaches ({', '.join(refusals)})", False


def address_for_others(endpoint_host: str) -> str | None:
    """Where the other hosts of a job reach this one; None: by its full name, as torchrun has it.

    That is the address from which this host reaches the store, for they reach that, too.  A name may
    be known to this host alone, or lead each host to itself.
    """
    towards = interface_towards(endpoint_host)
    if towards and not is_loopback(towards) and ":" not in towards:  # IPv6: programs write host:port
        return towards
    return None if addresses_of(socket.getfqdn()) else towards or None


def set_gloo_interface(address: str | None) -> None:
    """Let the ranks' gloo use the interface of `address` where this host's own name leads to itself alone.

    It would announce a loopback address to the other hosts, whose connections would end at themselves.
    """
    if address is None or GLOO_INTERFACE_ENV in os.environ or is_loopback(address):
        return
    if any(not is_loopback(found) for found in addresses_of(socket.gethostname())):
        return
    for interface, its in psutil.net_if_addrs().items():
        if any(one.address == address for one in its):
            os.environ[GLOO_INTERFACE_ENV] = interface


def check_first_host(name: str) -> None:
    """Say so if this host does not know the name under which its ranks are to find rank 0; does not block."""

    def look() -> None:
        if not addresses_of(name):
            logger.warning(
                "this host does not know the name %s of the host of rank 0: its ranks will not find that.  "
                "Give --local-addr there, with an address that all hosts reach",
                name,
            )

    threading.Thread(target=look, name="first-host-look", daemon=True).start()
