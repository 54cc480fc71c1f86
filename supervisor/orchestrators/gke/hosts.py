# SPDX-License-Identifier: Apache-2.0
"""Actions on nodes: cordon, uncordon, drain."""

from __future__ import annotations

import time

from supervisor.orchestrators.gke import nodes, pods
from supervisor.orchestrators.gke.client import NODES, PODS, ApiError, Object
from supervisor.orchestrators.gke.names import (
    BY_PERSON,
    COMMANDS,
    CORDONED_BY,
    DRAINED,
    JOBSET_NAME,
    annotations_of,
    is_deleting,
    labels_of,
    was_applied,
    with_command,
)
from supervisor.orchestrators.gke.view import LOOK_S, ClusterView, NotYet, Refused, TimedOut

#: Between tries of an eviction that a disruption budget is in the way of.
EVICT_S = 1.0


def cordoned_by(node: Object) -> str:
    """The supervisor's own command that cordoned it; empty where a person or the cluster did, or nobody."""
    mark = annotations_of(node).get(CORDONED_BY, "") if nodes.is_cordoned(node) else ""
    return "" if mark.startswith(BY_PERSON) else mark


class HostActions:
    """Idempotent by what is on the node: its taint, its pods, and the ids of commands."""

    def __init__(self, view: ClusterView) -> None:
        self._view = view

    async def cordon(self, host: str, command: str, *, by_person: bool = False) -> str:
        """Keep new pods off; says what was done."""
        node = await self._fresh(host)
        if node is None:
            return f"{host} is gone"
        if was_applied(node, command):
            return "cordoned before"
        marks = {COMMANDS: with_command(node, command)}
        await self._cordon(node, command, marks, by_person=by_person)
        return "cordoned"

    async def _cordon(self, node: Object, command: str, marks: dict[str, str], *, by_person: bool) -> Object:
        if by_person and (cordoned_by(node) or not nodes.is_cordoned(node)):
            marks = {**marks, CORDONED_BY: f"{BY_PERSON}{command}"}
        elif not nodes.is_cordoned(node):
            # Somebody else's cordon stays theirs.
            marks = {**marks, CORDONED_BY: command}
        body = {"metadata": {"annotations": marks}, "spec": {"unschedulable": True}}
        return await self._view.api.patch(NODES, node, body)

    async def uncordon(self, host: str, command: str, *, by_person: bool = False) -> str:
        """Let pods on a host again; says what was done.

        Raises:
            NotYet: the supervisor asks, and a person or the cluster has cordoned it.
        """
        node = await self._fresh(host) or await self._fresh(nodes.name_of(host))
        if node is None:
            raise Refused(f"there is no node {nodes.name_of(host)}")
        if was_applied(node, command):
            return "uncordoned before"
        if nodes.is_cordoned(node) and not (by_person or cordoned_by(node)):
            raise NotYet(f"node {node['metadata']['name']} was not cordoned by the supervisor, and stays so")
        marks = {COMMANDS: with_command(node, command), CORDONED_BY: None}
        await self._view.api.patch(
            NODES, node, {"metadata": {"annotations": marks}, "spec": {"unschedulable": None}}
        )
        return "uncordoned"

    async def drain(self, host: str, command: str, end: float) -> tuple[str, bool]:
        """Cordon, and have the pods of the workloads' namespace leave; whether a job ran there.

        Evicts as disruption budgets allow, up to `Times.evict_s`, then deletes.

        Args:
            end: when to give up, of the monotonic clock.
        Raises:
            TimedOut: pods are left.
        """
        node = await self._fresh(host)
        if node is None:
            return f"{host} is gone", False
        name = node["metadata"]["name"]
        of_a_job = annotations_of(node).get(DRAINED) == command
        if was_applied(node, command):
            return "drained before", of_a_job
        of_a_job = of_a_job or any(JOBSET_NAME in labels_of(pod) for pod in await self._pods_on(name))
        # What ran there is known to the next try, too, which may find no pod any more.
        await self._cordon(node, command, {DRAINED: command if of_a_job else ""}, by_person=True)
        said = await self._empty(name, end)
        await self._note_done(host, command)
        return f"cordoned; {said}", of_a_job

    async def _empty(self, name: str, end: float) -> str:
        """Have all pods leave a node."""
        times, asked = self._view.times, dict[str, float]()
        evict_until = min(time.monotonic() + times.evict_s, end - times.margin_s)
        evicted = deleted = 0
        while left := await self._pods_on(name):
            now = time.monotonic()
            if now >= end:
                raise TimedOut(f"{len(left)} pods are left on {name}")
            for pod in left:
                uid = pod["metadata"]["uid"]
                if is_deleting(pod) or now < asked.get(uid, 0.0):
                    continue
                if now >= evict_until and uid in asked:
                    deleted += await self._view.api.delete(PODS, pod)
                elif await self._view.api.evict(pod):
                    evicted += 1
                else:
                    asked[uid] = now + EVICT_S
            await self._view.end_stuck(left)
            await self._view.changes.wait(LOOK_S)
        against = f", {deleted} deleted against a disruption budget" if deleted else ""
        return f"{evicted} pods evicted{against}"

    async def _pods_on(self, name: str) -> list[Object]:
        found, _ = await self._view.api.list(PODS, self._view.namespace, fields=f"spec.nodeName={name}")
        return [pod for pod in found if not pods.is_of_the_node(pod) and not pods.has_ended(pod)]

    async def _note_done(self, host: str, command: str) -> None:
        """Remember a command on its node, which others write, too: a taint follows the cordon a second late.

        A conflict here must not make another try of the command, which would find nothing left to tell of.
        """
        for last in (False, False, True):
            node = await self._fresh(host)
            if node is None:
                return
            marks = {COMMANDS: with_command(node, command)}
            try:
                await self._view.api.patch(NODES, node, {"metadata": {"annotations": marks}})
                return
            except ApiError as error:
                if error.code != 409 or last:
                    raise

    async def has_rebooted(self, host: str) -> bool:
        """Whether its machine is there, by another boot than the one of the host's id."""
        node = await self._view.api.try_get(NODES, nodes.name_of(host))
        return node is not None and host not in (node["metadata"]["name"], nodes.host_id(node))

    async def _fresh(self, host: str) -> Object | None:
        """The node as the server has it now; None where it, or that boot of it, is gone."""
        for name in dict.fromkeys((host, nodes.name_of(host))):
            node = await self._view.api.try_get(NODES, name)
            if node is not None:
                return node if host in (name, nodes.host_id(node)) else None
        return None
