# SPDX-License-Identifier: Apache-2.0
"""The check of links: pairs of hosts send each other a message of bounded size, in rounds of group testing.

A pair fails when its message does not arrive in time and unchanged, or when it is much slower than the other
pairs.  So group testing names slow hosts and links just as broken ones.  A pair was not tested if one of its
hosts did not answer, could not make the test, or had no core for most of it.
"""

from __future__ import annotations

import random
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from resiliency.launch.health.pairing import Pair, Pairing
from resiliency.launch.health.scores import HostHealth
from resiliency.launch.host_check.exchange import Exchange
from resiliency.proc_stat import waited_for_core_s
from resiliency.runtime import awake_since

_MESSAGE_BYTES = 8 << 20
_MESSAGES, _PINGS = 3, 20
#: Of one pair, connecting included.
PAIR_S = 5.0
#: A pair is slow below this share of the median of at least so many pairs.
_SLOW_SHARE, _LEAST_PAIRS = 0.5, 3
_TOKEN_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class LinkFindings:
    """What the rounds have shown.

    Attributes:
        rates: MB/s of each pair whose message arrived.
        slow: those of them that count as failed.
        errors: why a pair failed.
    """

    pairing: Pairing
    rates: Mapping[Pair, float]
    slow: frozenset[Pair]
    errors: Mapping[Pair, str]

    def health_of(self, host: str) -> HostHealth:
        """SLOW instead of FAULTY where messages of this host did arrive, but late."""
        health = self.pairing.health_of(host)
        failed = {pair for pair in self.pairing.failed if host in pair}
        return HostHealth.SLOW if health is HostHealth.FAULTY and failed <= self.slow else health

    def sentences(self) -> list[str]:
        """A line for each link that is broken, or may be."""
        lines = [f"link {a} - {b} is broken: {self._why((a, b))}" for a, b in self.pairing.broken_links]
        lines += [
            f"{a}, {b} or the link between them is broken: {self._why((a, b))}"
            for a, b in self.pairing.suspect_pairs
        ]
        return lines

    def _why(self, pair: Pair) -> str:
        return f"{self.rates[pair]:.3g} MB/s" if pair in self.slow else self.errors.get(pair, "no result")


def check_links(
    exchange: Exchange, hosts: Sequence[str], *, address: str, timeout_s: float, pair_s: float = PAIR_S
) -> LinkFindings:
    """Test pairs until all hosts are decided, no pair is left, or a host says that `timeout_s` is over.

    All hosts of the check call it together, and have the same result.

    Args:
        hosts: their names, by rank.
        address: where the other hosts reach this one.
    Raises:
        PeerError: host 0 is gone.
    """
    deadline = time.monotonic() + timeout_s
    mine = hosts[exchange.rank]
    findings = LinkFindings(pairing=Pairing(hosts=tuple(hosts)), rates={}, slow=frozenset(), errors={})
    number = 0
    while pairs := findings.pairing.next_round():
        own = next((pair for pair in pairs if mine in pair), None)
        said: dict[str, Any] = {}
        if own is not None:
            said = _test_pair(
                exchange, f"link-{number}-{hosts.index(own[0])}", own[0] == mine, address, pair_s
            )
        said["late"] = time.monotonic() > deadline
        answers = dict(zip(hosts, exchange.gather(f"links-{number}", said, 2 * pair_s), strict=True))
        findings = with_answers(findings, pairs, answers)
        if any(answer.get("late") for answer in answers.values()):
            break
        number += 1
    return findings


def with_answers(
    findings: LinkFindings, pairs: Sequence[Pair], answers: Mapping[str, Mapping[str, Any]]
) -> LinkFindings:
    """Add what the hosts of a round said of their pairs: a pair passed if both of its hosts say so."""
    rates, errors, slow = {**findings.rates}, {**findings.errors}, set(findings.slow)
    for pair in pairs:
        said = [answers[host] for host in pair]
        why = [str(one["error"]) for one in said if "error" in one]
        if all("rate" in one for one in said):
            rates[pair] = float(said[1]["rate"])
        elif why and all(one.keys() & {"rate", "error"} for one in said):
            errors[pair] = why[0]
    waited = {pair for pair in pairs if any(answers[host].get("waited") for host in pair)}
    others = [rate for pair, rate in rates.items() if pair not in waited]
    middle = median(others) if len(others) >= _LEAST_PAIRS else 0.0
    tested = {}
    for pair in pairs:
        if pair in rates and rates[pair] >= _SLOW_SHARE * middle:
            tested[pair] = True
        elif pair in waited:
            rates.pop(pair, None)
        elif pair in rates.keys() | errors.keys():
            tested[pair] = False
            slow |= {pair} & rates.keys()
    return LinkFindings(
        pairing=findings.pairing.with_results(tested), rates=rates, slow=frozenset(slow), errors=errors
    )


def _test_pair(exchange: Exchange, name: str, listens: bool, address: str, limit_s: float) -> dict[str, Any]:
    """``{"rate": MB/s, "latency_ms": ms}`` or ``{"error": why}``; neither: there was no test.

    `waited`: this thread had no core for most of it, or its process was stopped.  An error that came at once
    is none of that: a link that nobody listens at refuses in a moment, on a busy machine as well.
    """
    waited_s, began = waited_for_core_s("thread-self"), time.monotonic()
    said = _exchange_messages(exchange, name, listens, address, began + limit_s)
    passed_s = time.monotonic() - began
    waited_s = max(waited_for_core_s("thread-self") - waited_s, passed_s - awake_since(began))
    return {**said, "waited": waited_s > (limit_s if "error" in said else passed_s) / 2}


def _exchange_messages(
    exchange: Exchange, name: str, listens: bool, address: str, deadline: float
) -> dict[str, Any]:
    limit_s = deadline - time.monotonic()
    is_ready = False
    try:
        if not listens:
            place = exchange.try_ask(name, limit_s)
            if place is None:
                return {}
            is_ready = True
            with socket.create_connection(tuple(place["at"]), timeout=limit_s) as connection:
                connection.sendall(bytes.fromhex(place["token"]))
                return _send(connection, deadline)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.create_server((address, 0), family=family) as listener:
            token = secrets.token_bytes(_TOKEN_BYTES)
            at = [address, listener.getsockname()[1]]
            exchange.tell(name, {"at": at, "token": token.hex()})
            is_ready = True
            while True:
                _limit(listener, deadline)
                with listener.accept()[0] as connection:
                    if _receive(connection, _TOKEN_BYTES, deadline) == token:  # else a stranger
                        return _return(connection, deadline)
    except OSError as error:
        return {"error": f"no whole message: {error.strerror or error}"} if is_ready else {}


def _message() -> bytes:
    return random.Random(7).randbytes(_MESSAGE_BYTES)  # noqa: S311 - both sides know it


def _send(connection: socket.socket, deadline: float) -> dict[str, Any]:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    message, rate, latency_s = _message(), 0.0, float("inf")
    for _ in range(_PINGS):
        began = time.perf_counter()
        connection.sendall(b"p")
        _receive(connection, 1, deadline)
        latency_s = min(latency_s, time.perf_counter() - began)
    for _ in range(_MESSAGES):
        _limit(connection, deadline)
        began = time.perf_counter()
        connection.sendall(message)
        if _receive(connection, len(message), deadline) != message:
            return {"error": "a message came back changed"}
        rate = max(rate, 2 * len(message) / 1e6 / (time.perf_counter() - began))
    connection.sendall(b"e")
    return {"rate": rate, "latency_ms": latency_s * 1e3}


def _return(connection: socket.socket, deadline: float) -> dict[str, Any]:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    message = _message()
    for _ in range(_PINGS):
        connection.sendall(_receive(connection, 1, deadline))
    for _ in range(_MESSAGES):
        found = _receive(connection, len(message), deadline)
        if found != message:
            return {"error": "a message arrived changed"}
        _limit(connection, deadline)
        connection.sendall(found)
    _receive(connection, 1, deadline)  # the partner has all of it
    return {"rate": 0.0}


def _receive(connection: socket.socket, size: int, deadline: float) -> bytes:
    found = bytearray(size)
    view = memoryview(found)
    while view:
        _limit(connection, deadline)
        count = connection.recv_into(view)
        if not count:
            raise ConnectionError("the partner closed the connection")
        view = view[count:]
    return bytes(found)


def _limit(connection: socket.socket, deadline: float) -> None:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    connection.settimeout(left_s)
