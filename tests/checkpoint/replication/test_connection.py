# SPDX-License-Identifier: Apache-2.0
"""Frames and handshakes over real sockets, with peers that are slow, silent, foreign or hostile."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from resiliency.checkpoint.replication.hosts import HostTable
from resiliency.checkpoint.replication.placement import Peer
from resiliency.checkpoint.replication.replica_store import ReplicaStore
from resiliency.checkpoint.replication.server import CONNECTIONS, PeerServer
from resiliency.checkpoint.replication.transport import connection
from resiliency.checkpoint.replication.transport.connection import CallDeadline, Link, Links
from resiliency.checkpoint.replication.transport.handshake import PeerRefused, admit, connect, introduce
from resiliency.checkpoint.replication.transport.messages import (
    PROTOCOL_VERSION,
    Acknowledged,
    Challenge,
    Chunk,
    ConnectionRefused,
    Hello,
    Message,
    Offer,
    PeerHeartbeat,
    Proof,
    Wanted,
    Welcome,
    decode,
    encode,
)
from resiliency.errors import CheckpointCorrupt, ConfigError, PeerError
from resiliency.runtime import awake_s
from tests.checkpoint.peer_builders import table_of
from tests.waiting import wait_until

#: Longer than a busy machine stops one of two threads that talk to each other.
SHORT = CallDeadline(silence=timedelta(seconds=1.5))
CALM = CallDeadline(silence=timedelta(seconds=60))
BEAT = encode(PeerHeartbeat())
A, B = Peer(host="a", address="127.0.0.1", port=1), Peer(host="b", address="127.0.0.1", port=2)


@pytest.fixture
def pair() -> Iterator[tuple[Link, socket.socket]]:
    """A link, and the bare socket at its other end."""
    ours, theirs = socket.socketpair()
    theirs.settimeout(60)
    with Link(ours, SHORT, "other") as link, theirs:
        yield link, theirs


@pytest.mark.parametrize(
    "message",
    [
        PeerHeartbeat(),
        Acknowledged(step=3, save_id="s-3"),
        Offer(source_host="h", step=1, save_id="s", ranks=(0, 7), sizes=(1, 2, 3)),
        Wanted(ranges=((0, 1, 2), (3, 4, 5))),
    ],
)
def test_messages_come_back_as_they_were(message: Message) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    "data",
    [
        b"", b"[]", b"null", b'{"kind": "nothing"}', b'{"kind": []}', b"[" * 100_000,
        b'{"kind": "beat", "more": 1}', b'{"kind": "sealed", "step": "3", "save_id": "s"}',
        b'{"kind": "sealed", "step": true, "save_id": "s"}', b'{"kind": "wanted", "ranges": [[1, 2]]}',
        b'{"kind": "offer", "owner": "h", "step": 1, "save_id": "s", "ranks": [0.5], "sizes": []}',
    ],
)  # fmt: skip
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(PeerError):
        decode(data)


def test_parts_of_files_travel_behind_a_message(tmp_path: Path, pair: tuple[Link, socket.socket]) -> None:
    content = os.urandom(3_000_000)
    (tmp_path / "file").write_bytes(content)
    link, theirs = pair
    other = Link(theirs, CALM)
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(link.send_file, Chunk(file=0, number=1), fd, 1000, 2_500_000)
        message, size = other.receive()
        target = bytearray(size)
        other.receive_bytes(memoryview(target))
        sent.result(60)
    assert (message, bytes(target)) == (Chunk(file=0, number=1), content[1000:2_501_000])
    with pytest.raises(CheckpointCorrupt, match="ends at byte 3000000"):
        link.send_file(Chunk(file=0, number=1), fd, 2_999_000, 2000)
    os.close(fd)


def test_a_wait_that_this_process_slept_through_begins_again(
    pair: tuple[Link, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    link, theirs = pair
    slept_s, began = 10.0, awake_s()
    monkeypatch.setattr(connection, "awake_s", lambda: began + max(awake_s() - began - slept_s, 0.0))
    link.grant(CallDeadline(silence=timedelta(seconds=0.2)))
    late = threading.Timer(0.7, theirs.sendall, [struct.pack("!4sIQ", b"rpp1", len(BEAT), 0) + BEAT])
    late.start()
    try:
        assert link.receive() == (PeerHeartbeat(), 0)
        slept_s = 0.0
        with pytest.raises(PeerError, match="has moved no byte"):
            link.receive()
    finally:
        late.join()


@pytest.mark.parametrize(
    "frame",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("!4sIQ", b"rpp1", 1 << 30, 0),
        struct.pack("!4sIQ", b"rpp1", 4, 0) + b"junk",
    ],
)
def test_frames_of_strangers_are_refused_before_anything_is_read(
    pair: tuple[Link, socket.socket], frame: bytes
) -> None:
    link, theirs = pair
    theirs.sendall(frame)
    with pytest.raises(PeerError):
        link.receive()


def test_a_silent_peer_is_given_up(pair: tuple[Link, socket.socket]) -> None:
    with pytest.raises(PeerError, match=r"no byte for 1\.5 s"):
        pair[0].receive()


def test_a_peer_that_drips_is_given_up(pair: tuple[Link, socket.socket]) -> None:
    link, theirs = pair
    stop = threading.Event()

    def drip() -> None:
        while not stop.wait(0.05):
            theirs.send(b"r")

    theirs.sendall(struct.pack("!4sIQ", b"rpp1", 1000, 0))
    with ThreadPoolExecutor(1) as pool:
        dripping = pool.submit(drip)
        try:
            with pytest.raises(PeerError, match="too slow"):
                link.receive()
        finally:
            stop.set()
        dripping.result(60)


def test_a_peer_that_takes_nothing_is_given_up_unless_it_says_that_it_lives(
    tmp_path: Path, pair: tuple[Link, socket.socket]
) -> None:
    link, theirs = pair
    other = Link(theirs, CALM)
    (tmp_path / "file").write_bytes(bytes(8 << 20))
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(link.send_file, Chunk(file=0, number=0), fd, 0, 8 << 20)
        for _ in range(6):  # longer than its patience
            threading.Event().wait(0.3)
            other.send(PeerHeartbeat())
        assert not sent.done()
        with pytest.raises(PeerError, match="no byte"):
            sent.result(60)
    os.close(fd)


def test_cutting_a_link_ends_who_waits_on_it() -> None:
    ours, theirs = socket.socketpair()
    links = Links()
    link = links.add(Link(ours, CALM, "other"))
    with theirs, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(link.receive)
        links.cut_all()
        with pytest.raises(PeerError):
            waiting.result(60)
        links.drop(link)


def test_messages_that_come_in_pieces_or_together_are_read_without_waiting(
    pair: tuple[Link, socket.socket],
) -> None:
    link, theirs = pair
    body = encode(Acknowledged(step=1, save_id="s"))
    frame = struct.pack("!4sIQ", b"rpp1", len(body), 0) + body
    theirs.sendall(frame + frame + frame[:20])
    assert link.receive_ready() == [Acknowledged(step=1, save_id="s")] * 2
    assert link.receive_ready() == []
    theirs.sendall(frame[20:])
    assert link.receive_ready() == [Acknowledged(step=1, save_id="s")]
    theirs.close()
    with pytest.raises(PeerError, match="closed"):
        link.receive_ready()


# --- the handshake --------------------------------------------------------------------------------


def shake(
    ours: HostTable, theirs: HostTable | None, *, host: str = "a", server: str = "b"
) -> tuple[object, object]:
    """What both sides make of each other: None, or the error."""
    one, two = socket.socketpair()
    with Link(one, CALM, "b") as client, Link(two, CALM) as serving, ThreadPoolExecutor(1) as pool:

        def serve() -> None:
            try:
                admit(serving, lambda: theirs, server)
                assert serving.host == host
            finally:
                serving.cut()

        served = pool.submit(serve)
        try:
            introduce(client, ours, host)
            error: object = None
        except PeerError as failure:
            error = failure
            client.cut()
        return error, served.exception(60)


def test_hosts_of_one_session_recognise_each_other() -> None:
    assert shake(table_of([A, B]), table_of([A, B])) == (None, None)


@pytest.mark.parametrize(
    ("theirs", "how", "found"),
    [
        (table_of([A, B], token="another"), {}, "does not know the secret"),  # noqa: S106
        (table_of([A, B], attempt_id="later"), {}, "stranger.*'later'"),
        (None, {}, "stranger.*none yet"),
        (table_of([B]), {}, "stranger.*'a' is no host"),
        (table_of([A, B]), {"server": "c"}, "expected host b, found c"),
    ],
)
def test_strangers_find_no_way_in(theirs: HostTable | None, how: dict[str, str], found: str) -> None:
    error, served = shake(table_of([A, B]), theirs, **how)
    with pytest.raises(PeerError, match=found):
        raise error  # type: ignore[misc]
    assert isinstance(served, PeerError)


def test_who_does_not_know_the_secret_cannot_prove_it() -> None:
    ours, theirs = socket.socketpair()
    with Link(ours, CALM, "b") as client, Link(theirs, CALM) as serving, ThreadPoolExecutor(1) as pool:
        served = pool.submit(admit, serving, lambda: table_of([A, B]), "b")
        client.send(Hello(version=PROTOCOL_VERSION, attempt_id="session", host="a", nonce="n"))
        challenge, _ = client.receive()
        client.send(Proof(proof=challenge.proof))  # type: ignore[union-attr]  # the server's own, sent back
        answer = client.receive_answer()
        assert not isinstance(answer, Welcome)
        client.close()
        with pytest.raises(PeerError, match="wrong proof"):
            served.result(60)


def test_a_proof_of_any_characters_is_a_wrong_proof_and_no_other_error() -> None:
    ours, theirs = socket.socketpair()
    with Link(ours, CALM, "b") as client, Link(theirs, CALM) as stranger, ThreadPoolExecutor(1) as pool:
        introduced = pool.submit(introduce, client, table_of([A, B]), "a")
        stranger.receive()
        stranger.send(Challenge(host="b", nonce="n", proof="\u00e9\ud83d\ude00"))
        with pytest.raises(PeerError, match="does not know the secret"):
            introduced.result(60)


# --- the server -----------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PeerServer]:
    serving = PeerServer(
        "b", "127.0.0.1", ReplicaStore(tmp_path), table=lambda: table_of([A, B]), join=lambda link: False,
        timeouts=SHORT,
    )  # fmt: skip
    yield serving
    serving.close()


def reach(server: PeerServer, table: HostTable) -> Link:
    return connect(table, "a", replace(B, port=server.port), CALM, Links())


def test_the_server_lets_hosts_of_its_session_in_and_no_others(server: PeerServer) -> None:
    reach(server, table_of([A, B])).close()
    with pytest.raises(PeerRefused, match="attempt"):
        reach(server, table_of([A, B], attempt_id="older"))
    with pytest.raises(PeerError):
        reach(server, table_of([A, B], token="guessed"))  # noqa: S106


def test_silent_and_babbling_strangers_do_not_keep_hosts_out(server: PeerServer) -> None:
    strangers = [socket.create_connection(("127.0.0.1", server.port), 60) for _ in range(CONNECTIONS + 8)]
    for number, stranger in enumerate(strangers):
        if number % 2:
            stranger.send(b"GET / HTTP/1.1\r\n" * 100)

    def is_let_in() -> bool:
        try:
            reach(server, table_of([A, B])).close()
        except PeerError:
            return False
        return True

    # All threads may be busy with strangers at first, each for as long as its patience.
    wait_until(is_let_in, "strangers keep hosts out")
    for stranger in strangers:
        stranger.close()
    wait_until(
        lambda: sum(t.name == "resiliency-peer-serve" for t in threading.enumerate()) == 0,
        "threads of strangers stay",
    )


def test_strangers_hold_a_server_up_for_the_time_of_a_greeting_however_patient_it_is_with_hosts(
    tmp_path: Path,
) -> None:
    serving = PeerServer(
        "b", "127.0.0.1", ReplicaStore(tmp_path), table=lambda: table_of([A, B]), join=lambda link: False,
        timeouts=replace(CALM, connect=timedelta(seconds=0.5)),
    )  # fmt: skip
    strangers = [socket.create_connection(("127.0.0.1", serving.port), 60) for _ in range(2 * CONNECTIONS)]
    try:
        began = time.monotonic()
        reach(serving, table_of([A, B])).close()
        assert time.monotonic() - began < CALM.silence.total_seconds() / 2
    finally:
        for stranger in strangers:
            stranger.close()
        serving.close()


@pytest.mark.parametrize(
    "offer",
    [
        Offer(source_host="h", step=1, save_id="s", ranks=(0,), sizes=(5,)),
        Offer(source_host="h", step=1, save_id="s", ranks=(0, 0), sizes=(2, 2, 1)),
        Offer(source_host="h", step=1, save_id="s", ranks=(), sizes=(-5,)),
        Offer(source_host="h", step=1, save_id="s", ranks=(), sizes=(4,)),
        Offer(source_host="h", step=1, save_id="s", ranks=(0,), sizes=(3, 2)),
        Offer(source_host="../..", step=1, save_id="s", ranks=(0,), sizes=(3, 2)),
    ],
)
def test_an_offer_that_makes_no_sense_leaves_nothing_behind(
    server: PeerServer, tmp_path: Path, offer: Offer
) -> None:
    with reach(server, table_of([A, B])) as link:
        link.send(offer, b"12345")
        with suppress(PeerError):  # it may just hang up
            answer = link.receive_answer()
            assert isinstance(answer, ConnectionRefused)
            assert answer.why == "invalid"
    assert list(tmp_path.iterdir()) == []
    reach(server, table_of([A, B])).close()


def test_an_address_that_is_not_of_this_host_is_a_mistake_of_the_caller(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        PeerServer(
            "b", "192.0.2.1", ReplicaStore(tmp_path), table=lambda: None, join=lambda link: False,
            timeouts=SHORT,
        )  # fmt: skip
