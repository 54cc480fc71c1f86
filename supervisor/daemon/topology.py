# SPDX-License-Identifier: Apache-2.0
"""Where this host is: the metadata server of Google Compute Engine, and the labels of its node.

    zone                         projects/7/zones/us-east5-a
    attributes/physical_host     /block/subblock/machine

The metadata server needs no rights and answers before anything else runs.  Labels come from the actuator,
which has the rights; a person can set them, so they go first.  Neither is waited for: a host without a known
place shares no failure domain, as far as anybody knows.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import Mapping, Sequence

from resiliency.errors import ConfigError
from resiliency.tasks import wait_for
from supervisor.values import MAX_NAME_CHARS, HostFacts

logger = logging.getLogger(__name__)

#: Google's own variable for another metadata server; and where it is on each of its machines.
METADATA_ENV = "GCE_METADATA_HOST"
_ADDRESS, _PORT = "169.254.169.254", 80
#: For one question, and the pauses before the questions are asked again.
QUESTION_S = 2.0
PAUSES_S = (1.0, 10.0, 60.0)
#: An answer is a short line with its headers.
_MOST_BYTES = 16 << 10


def metadata_address(env: Mapping[str, str]) -> tuple[str, int]:
    """Where the metadata server listens.

    Raises:
        ConfigError: the variable holds no address.
    """
    host, _, port = (env.get(METADATA_ENV) or _ADDRESS).partition(":")
    try:
        ipaddress.IPv4Address(host)
        number = int(port or _PORT)
    except ValueError:
        number = 0
    if not 1 <= number <= 65535:
        # A name would be resolved in a thread, which nothing can end.
        raise ConfigError(
            f"{METADATA_ENV} must be an IPv4 address with or without a port, found "
            f"{env[METADATA_ENV]!r:.80}.",
            variable=METADATA_ENV,
        )
    return host, number


async def find_place(
    address: tuple[str, int],
    *,
    question_s: float = QUESTION_S,
    pauses_s: Sequence[float] = PAUSES_S,
) -> HostFacts | None:
    """What the metadata server says; None where there is none, after all tries."""
    why = ""
    for pause_s in (*pauses_s, None):
        try:
            zone = await wait_for(_ask(address, "zone"), question_s)
            machine = await wait_for(_ask(address, "attributes/physical_host"), question_s)
        except (OSError, ValueError, asyncio.TimeoutError) as error:
            why = str(error) or f"no answer within {question_s:g} s"
        else:
            block, subblock, *_ = (*machine.strip("/").split("/"), "", "")
            found = (_label(subblock), _label(block), _label(zone.rpartition("/")[2]))
            return HostFacts(subblock=found[0], superblock=found[1], zone=found[2])
        if pause_s is not None:
            await asyncio.sleep(pause_s)
    logger.info("place of this host: no metadata server at %s:%d: %s; labels only", *address, why)
    return None


def merge_facts(first: HostFacts, second: HostFacts) -> HostFacts:
    """What `first` says, and what `second` says where that says nothing."""
    return HostFacts(
        subblock=first.subblock or second.subblock,
        superblock=first.superblock or second.superblock,
        zone=first.zone or second.zone,
    )


def _label(text: str) -> str:
    """`text` where it can be a failure domain, else nothing."""
    fit = text.isprintable() and len(text) <= MAX_NAME_CHARS and not set(text) & set(" ,=")
    return text if fit else ""


async def _ask(address: tuple[str, int], path: str) -> str:
    """The value of one key; empty where the server has none.

    Raises:
        OSError, ValueError: it is no metadata server, or is not there.
    """
    reader, writer = await asyncio.open_connection(*address)
    try:
        question = (
            f"GET /computeMetadata/v1/instance/{path} HTTP/1.0\r\nHost: metadata.google.internal\r\n"
            "Metadata-Flavor: Google\r\nConnection: close\r\n\r\n"
        )
        writer.write(question.encode())
        answer = b""
        while len(answer) < _MOST_BYTES and (data := await reader.read(_MOST_BYTES)):
            answer += data
    finally:
        writer.close()
    head, _, body = answer.decode().partition("\r\n\r\n")
    status = head.split(maxsplit=2)[1:2]
    # Other clouds have servers of other kinds at the same address.
    if "metadata-flavor: google" not in head.lower() or status not in (["200"], ["404"]):
        raise ValueError(f"it is not Google's: {head[:80]!r}")
    return body.strip() if status == ["200"] else ""
