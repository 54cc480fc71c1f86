# SPDX-License-Identifier: Apache-2.0
"""Group testing over pairs of hosts: which hosts and which links are broken, in few rounds.

A test uses two hosts and the link between them, and passes only when all three are in order.  So a test that
passes proves both hosts, and a test that fails accuses neither of them.  A test that was not made, as one of
its hosts did not answer or had no core, is no evidence.  A round tests disjoint pairs:

1. Neighbours.  With an odd number of hosts the last one waits: three hosts in one test would blur it.
2. Suspects, each with a host that is proven good.  While no host is proven, suspects with other suspects.
3. The same, until each host is decided, or no pair is left that says anything new.

Two proven hosts whose test failed have a broken link.  A host is faulty when it failed with two proven hosts:
one failure may be that link.  No healthy host is accused as long as it has at most one broken link; a host
with more is broken for its job, whatever the cause.

Rounds: with at most a quarter of the hosts faulty, all are decided after two rounds if the number of hosts
is even and no two faulty hosts are neighbours, else after three.  Fewer are not enough: one failure with a
proven host fits a broken link as well as a broken host.  Two hosts alone stay undecided ("one of these two");
a spare is simply a third host.

The next round follows from the results alone: hosts that read the same results agree on it without a leader,
and nothing of an earlier check can be left in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from resiliency.launch.health.scores import HostHealth

#: Two hosts, in the order of `Pairing.hosts`.
Pair = tuple[str, str]
#: Proven hosts with which a faulty host fails.
_ENOUGH = 2


@dataclass(frozen=True, kw_only=True)
class Pairing:
    """Results of some rounds; `with_results` gives the value after the next one.

    Attributes:
        untested: pairs whose test was asked for and not made; they are not asked for again.
    """

    hosts: tuple[str, ...]
    passed: frozenset[Pair] = frozenset()
    failed: frozenset[Pair] = frozenset()
    untested: frozenset[Pair] = frozenset()

    def __post_init__(self) -> None:
        if len(set(self.hosts)) < len(self.hosts):
            raise ValueError(f"each host is named once, found {self.hosts}")

    def with_results(self, results: Mapping[Pair, bool]) -> Pairing:
        """Add a round: pair -> whether its test passed.  A pair without a result was not tested.

        Raises:
            ValueError: a result is of a pair that this round did not test, as one of an earlier check.
        """
        asked = self.next_round()
        if strange := results.keys() - set(asked):
            raise ValueError(f"this round did not test {sorted(strange)}")
        passed = {pair for pair, works in results.items() if works}
        return replace(
            self,
            passed=self.passed | passed,
            failed=self.failed | (results.keys() - passed),
            untested=self.untested | (set(asked) - results.keys()),
        )

    def next_round(self) -> tuple[Pair, ...]:
        """Disjoint pairs to test now; empty: no test would say anything new."""
        if not self.passed | self.failed | self.untested:
            return tuple(zip(self.hosts[::2], self.hosts[1::2], strict=False))
        suspects, proven = self.undecided, self.proven
        if not suspects:
            return ()
        pairs = self._suspects_with(proven) if proven else self._suspects_with(suspects)
        return tuple(sorted(map(self._ordered, pairs)))

    @cached_property
    def proven(self) -> tuple[str, ...]:
        """Hosts that took part in a test that passed."""
        good = {host for pair in self.passed for host in pair}
        return tuple(host for host in self.hosts if host in good)

    @property
    def faulty(self) -> tuple[str, ...]:
        """Hosts that failed with two proven hosts, and passed with none."""
        return tuple(host for host in self.hosts if self.health_of(host) is HostHealth.FAULTY)

    @cached_property
    def undecided(self) -> tuple[str, ...]:
        """Hosts of which neither is known."""
        return tuple(host for host in self.hosts if self.health_of(host) is HostHealth.UNDECIDED)

    @property
    def broken_links(self) -> tuple[Pair, ...]:
        """Pairs that failed although both hosts are proven good."""
        proven = set(self.proven)
        return tuple(sorted(pair for pair in self.failed if proven.issuperset(pair)))

    @property
    def suspect_pairs(self) -> tuple[Pair, ...]:
        """Pairs that failed and have no decided host: one of both, or the link, is broken."""
        open_ = set(self.undecided)
        return tuple(sorted(pair for pair in self.failed if open_.issuperset(pair)))

    def health_of(self, host: str) -> HostHealth:
        """OK, FAULTY or UNDECIDED."""
        if host in self.proven:
            return HostHealth.OK
        return HostHealth.FAULTY if len(self._failed_with_proven(host)) >= _ENOUGH else HostHealth.UNDECIDED

    def why(self, host: str) -> str:
        """The evidence for `health_of`, as a sentence without its subject."""
        health, partners = self.health_of(host), sorted(self._partners(host, self.failed))
        if health is HostHealth.OK:
            return f"passed with {', '.join(sorted(self._partners(host, self.passed)))}"
        if health is HostHealth.FAULTY:
            return f"failed with {', '.join(self._failed_with_proven(host))}, which passed with other hosts"
        if not partners:
            met = sorted(self._partners(host, self.untested))
            return f"no test: none with {', '.join(met)} was made" if met else "no test: no partner was left"
        return f"failed with {', '.join(partners)}: one of these hosts or a link between them is broken"

    def _suspects_with(self, partners: tuple[str, ...]) -> Iterator[Pair]:
        """Each suspect with a free partner that it has not met, as far as there are partners."""
        free = dict.fromkeys(partners)
        taken: set[str] = set()
        for suspect in self._by_promise():
            if suspect in taken:
                continue
            met = self._partners(suspect, self.failed | self.untested) | taken | {suspect}
            partner = next((one for one in free if one not in met), None)
            if partner is not None:
                taken |= {suspect, partner}
                yield suspect, partner

    def _by_promise(self) -> list[str]:
        """Suspects, those first whose tests are likely to pass: a proven host can test another one next time.

        Of each pair that failed, one suspect goes before the other: if it passes, the other one has failed
        with a proven host.
        """
        first: set[str] = set()
        rank: dict[str, tuple[int, int, bool]] = {}
        for host in self.undecided:
            partners = self._partners(host, self.failed | self.untested)
            second = bool(first & partners)
            if not second:
                first.add(host)
            rank[host] = (len(self._failed_with_proven(host)), len(partners), second)
        return sorted(rank, key=lambda host: rank[host])

    def _failed_with_proven(self, host: str) -> list[str]:
        proven = set(self.proven)
        return sorted(self._partners(host, self.failed) & proven)

    @staticmethod
    def _partners(host: str, pairs: frozenset[Pair]) -> set[str]:
        return {other for pair in pairs if host in pair for other in pair if other != host}

    def _ordered(self, pair: Pair) -> Pair:
        first, second = sorted(pair, key=self.hosts.index)
        return first, second
