# SPDX-License-Identifier: Apache-2.0
"""Copies from host to host: whole ones, broken connections, refusals, dead, stopped and full hosts."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from resiliency.checkpoint.format.catalog import Condition, inspect
from resiliency.checkpoint.format.marker import Marker, MarkerState, put_marker
from resiliency.checkpoint.replication.copy_plan import CopyPlan
from resiliency.checkpoint.replication.hosts import HostTable
from resiliency.checkpoint.replication.placement import Peer
from resiliency.checkpoint.replication.replica_store import ReplicaStore
from resiliency.checkpoint.replication.sender import CopySource, Sender, SourceUnavailable
from resiliency.checkpoint.replication.server import RECEIVERS, PeerServer
from resiliency.checkpoint.replication.transport.connection import CallDeadline, Link, Links
from resiliency.checkpoint.replication.transport.handshake import PeerRefused, admit, connect
from resiliency.checkpoint.replication.transport.messages import (
    ConnectionRefused,
    Offer,
    PeerHeartbeat,
    Wanted,
)
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.checkpoint.storage.throttle import Throttle
from resiliency.errors import CheckpointCorrupt, CheckpointError, CheckpointIncomplete, PeerError
from resiliency.testing.storage import FaultyStorage, StorageFault, StorageFaultKind
from resiliency.testing.system_faults import NO_THREAD, SystemFault
from tests.checkpoint.peer_builders import QUICK, commit_step, save_name, table_of, tree
from tests.checkpoint.storage_builders import file_in
from tests.checkpoint.system_errors import nothing_leaks
from tests.waiting import wait_until

LARGE = 9 << 20  # three chunks, with the rest
#: With a wire that waits for a disk.
CALM = replace(QUICK, silence=timedelta(seconds=60))


class Receiver:
    """A host that receives, in this process."""

    def __init__(
        self,
        root: Path,
        timeouts: CallDeadline = QUICK,
        fault: StorageFault | None = None,
        on_kill: Callable[[], object] = bool,
    ) -> None:
        self.root = root
        #: Every storage that was opened, to count its operations.
        self.storages: list[FaultyStorage] = []
        self._fault = fault
        self._on_kill = on_kill
        self.table: HostTable | None = None
        self.store = ReplicaStore(root, open_storage=self._open)
        self.server = PeerServer(
            "b", "127.0.0.1", self.store, table=lambda: self.table, join=lambda link: False,
            timeouts=timeouts,
        )  # fmt: skip
        self.peer = Peer(host="b", address="127.0.0.1", port=self.server.port)
        self.table = table_of([Peer(host="a", address="127.0.0.1", port=1), self.peer])

    def _open(self, source_host: str) -> FaultyStorage:
        disk = LocalStorage(self.root / "replicas" / source_host)
        storage = FaultyStorage(disk, self._fault, on_kill=self._on_kill)
        self.storages.append(storage)
        self._fault = None
        return storage

    def close(self) -> None:
        self.server.close()
        self.store.close()

    def is_idle(self) -> bool:
        """Whether its disk has all that came: a copy whose connection broke is written behind it."""
        return all(thread.name != "resiliency-replica" for thread in threading.enumerate())

    def replica(self) -> LocalStorage:
        return LocalStorage(self.root / "replicas" / "a")


class Wire:
    """Between the two: passes bytes on, and cuts or changes them after so many from the sender.

    It lets the next connection through when the receiver is done with the one before.
    """

    def __init__(self, receiver: Receiver) -> None:
        self._to = receiver
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        #: Of each connection, in order: cut it after that many bytes; or flip a bit there.
        self.cuts: list[int] = []
        self.flips: list[int] = []
        self.connections = 0
        #: From the sender, over all connections.
        self.passed_bytes = 0
        self._open = [self._listener]
        self._threads: list[threading.Thread] = []
        self._spawn(self._accept)

    def _spawn(self, work: object, *args: object) -> None:
        thread = threading.Thread(target=work, args=args)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            wait_until(self._to.is_idle, "the disk does not answer")
            far = socket.create_connection(("127.0.0.1", self._to.peer.port))
            self._open += [near, far]
            self.connections += 1
            cut = self.cuts.pop(0) if self.cuts else -1
            flip = self.flips.pop(0) if self.flips else -1
            self._spawn(self._pass, near, far, True, cut, flip)
            self._spawn(self._pass, far, near, False, -1, -1)

    def _pass(self, source: socket.socket, target: socket.socket, is_sent: bool, cut: int, flip: int) -> None:
        passed = 0
        with suppress(OSError):
            while data := bytearray(source.recv(64 << 10)):
                if passed <= flip < passed + len(data):
                    data[flip - passed] ^= 1
                passed += len(data)
                if 0 <= cut < passed:
                    break
                target.sendall(data)
                if is_sent:
                    self.passed_bytes += len(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join(60)
        for end in self._open:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(60)
        for end in self._open:
            end.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def receiver(tmp_path: Path, stack: ExitStack) -> Receiver:
    receiver = Receiver(tmp_path / "b")
    stack.callback(receiver.close)
    return receiver


@pytest.fixture
def own(tmp_path: Path) -> Path:
    root = tmp_path / "a"
    storage = LocalStorage(root)
    commit_step(storage, 1, ranks=(0, 1))
    commit_step(storage, 2, ranks=(0, 1), size_bytes=LARGE)
    return root


class CountingThrottle(Throttle):
    """Every chunk passes it before it is sent."""

    sent_bytes = 0

    def wait(
        self,
        size_bytes: int,
        every_s: float = threading.TIMEOUT_MAX,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        super().wait(size_bytes, every_s, meanwhile)
        self.sent_bytes += size_bytes


class Sending:
    def __init__(self, own: Path, receiver: Receiver, **how: object) -> None:
        self.throttle = CountingThrottle(int(how.get("bytes_per_s", 0)))  # type: ignore[call-overload]
        self._own = own
        self._receiver = receiver
        timeouts = how.get("timeouts", QUICK)
        self._sender = Sender("a", Links(), self.throttle, timeouts)  # type: ignore[arg-type]

    def send(self, step: int, *, port: int = 0, attempt_id: str = "", source_host: str = "a") -> None:
        assert self._receiver.table is not None
        table = self._receiver.table
        if attempt_id:
            table = replace(table, attempt_id=attempt_id)
        target = replace(self._receiver.peer, port=port or self._receiver.peer.port)
        with CopySource(self._own, step, save_name(step)) as source:
            self._sender.send(source, source_host, table, target)


def assert_copied(own: Path, receiver: Receiver, step: int) -> None:
    assert inspect(receiver.replica(), step).condition is Condition.COMPLETE
    assert tree(receiver.replica().root / f"step={step}") == tree(own / f"step={step}")


def test_a_copy_arrives_whole_and_is_not_sent_twice(own: Path, receiver: Receiver) -> None:
    sending = Sending(own, receiver)
    for step in (1, 2):
        sending.send(step)
        assert_copied(own, receiver, step)
    whole = sum(inspect(receiver.replica(), step).size_bytes for step in (1, 2))
    sending.send(2)
    assert sending.throttle.sent_bytes == whole


@pytest.mark.parametrize("cuts", [[5 << 20], [5 << 20, 5 << 20, 5 << 20], [17 << 20]])
def test_a_broken_connection_is_made_again_and_goes_on_where_it_was(
    own: Path, receiver: Receiver, stack: ExitStack, cuts: list[int]
) -> None:
    wire = Wire(receiver)
    stack.callback(wire.close)
    wire.cuts = list(cuts)
    sending = Sending(own, receiver, timeouts=CALM)
    sending.send(2, port=wire.port)
    assert_copied(own, receiver, 2)
    assert wire.connections == len(cuts) + 1
    # What arrived before a cut was not sent again.
    whole = inspect(receiver.replica(), 2).size_bytes
    cut_chunks, messages = len(cuts) * (4 << 20), 1 << 16
    assert whole <= wire.passed_bytes < whole + cut_chunks + messages


def test_a_bit_that_flips_on_the_way_is_found_and_the_chunk_sent_again(
    own: Path, receiver: Receiver, stack: ExitStack
) -> None:
    wire = Wire(receiver)
    stack.callback(wire.close)
    wire.flips = [6 << 20]
    sending = Sending(own, receiver, timeouts=CALM)
    sending.send(2, port=wire.port)
    assert_copied(own, receiver, 2)
    assert wire.connections == 2


def test_a_bit_that_flipped_on_the_owners_disk_is_not_replicated(own: Path, receiver: Receiver) -> None:
    with open(file_in(own / "step=2", "rank=1.slot.bin"), "r+b") as file:
        file.seek(5 << 20)
        byte = file.read(1)
        file.seek(5 << 20)
        file.write(bytes([byte[0] ^ 4]))
    with pytest.raises(CheckpointCorrupt, match=r"rank=1\.slot\.bin, bytes 4194304"):
        Sending(own, receiver).send(2)
    assert inspect(receiver.replica(), 2).condition is Condition.UNFINISHED


def test_a_file_that_is_too_short_is_not_replicated(own: Path, receiver: Receiver) -> None:
    os.truncate(file_in(own / "step=2", "rank=0.slot.bin"), 5 << 20)
    with pytest.raises(CheckpointCorrupt, match=r"rank=0\.slot\.bin was cut"):
        Sending(own, receiver).send(2)


@pytest.mark.parametrize("damage", ["marker", "other save", "no file"])
def test_only_a_committed_step_is_sent(own: Path, damage: str) -> None:
    if damage == "marker":
        put_marker(LocalStorage(own), 1, Marker(state=MarkerState.CORRUPT))
    elif damage == "no file":
        (file_in(own / "step=1", "rank=1.slot.bin")).unlink()
    with pytest.raises(CheckpointIncomplete):
        CopySource(own, 1, "another-1" if damage == "other save" else save_name(1))


@pytest.mark.parametrize("name", ["manifest.json", "rank=1.json", "rank=1.slot.bin"])
def test_what_the_system_refuses_to_open_is_no_damage(own: Path, name: str) -> None:
    """A link to itself stands for all errors that say nothing of the file: ELOOP."""
    path = file_in(own / "step=1", name)
    kept = path.rename(own / "kept")
    path.symlink_to(path)
    with pytest.raises(SourceUnavailable, match=r"ELOOP|Too many levels"):
        CopySource(own, 1, save_name(1))
    kept.rename(path)
    CopySource(own, 1, save_name(1)).close()


def test_a_step_that_is_deleted_while_it_is_sent_arrives_whole(own: Path, receiver: Receiver) -> None:
    expected = tree(own / "step=2")
    sending = Sending(own, receiver)
    assert receiver.table is not None
    with CopySource(own, 2, save_name(2)) as source:
        LocalStorage(own).remove_tree("step=2")
        Sender("a", Links(), sending.throttle, QUICK).send(source, "a", receiver.table, receiver.peer)
    assert tree(receiver.replica().root / "step=2") == expected


def test_nobody_there_is_an_error_at_once(own: Path, receiver: Receiver) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(PeerError, match="cannot reach b"):
        Sending(own, receiver).send(1, port=port)


def test_a_host_that_accepts_and_says_nothing_is_given_up(own: Path, receiver: Receiver) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(PeerError, match="no byte for 3 s"):
            Sending(own, receiver).send(1, port=port)


def test_a_host_of_another_session_refuses(own: Path, receiver: Receiver) -> None:
    with pytest.raises(PeerRefused, match="stranger"):
        Sending(own, receiver).send(1, attempt_id="later")


def test_a_full_disk_is_a_refusal_that_names_it(tmp_path: Path, own: Path, stack: ExitStack) -> None:
    disk = tmp_path / "full"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=12m", "none", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    stack.callback(subprocess.run, ["umount", str(disk)], check=True)
    receiver = Receiver(disk)
    stack.callback(receiver.close)
    sending = Sending(own, receiver)
    sending.send(1)
    with pytest.raises(PeerRefused, match=r"storage.*ENOSPC") as caught:
        sending.send(2)
    assert caught.value.fields["refusal"] == "storage"
    assert_copied(own, receiver, 1)
    wait_until(lambda: receiver.replica().list("") == ["step=1"], "the refused copy stays on the full disk")
    receiver.close()


@pytest.mark.slow
def test_a_slow_disk_delays_a_copy_and_does_not_fail_it(
    tmp_path: Path, own: Path, receiver: Receiver, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    Sending(own, receiver).send(1)
    operations = len(receiver.storages[0].operations)
    # The last two of them take longer than the sender's patience with a silent host.
    fault = StorageFault(operation=operations - 2, kind=StorageFaultKind.SLOW, delay=QUICK.silence * 1.2)
    slow = Receiver(tmp_path / "slow", fault=fault)
    stack.callback(slow.close)
    sending = Sending(own, slow)
    sending.send(1)
    assert_copied(own, slow, 1)
    assert "Going on after" not in caplog.text


def test_a_disk_that_does_not_answer_is_a_refusal_and_the_copy_goes_on_when_it_does(
    tmp_path: Path, own: Path, stack: ExitStack
) -> None:
    answers = threading.Event()
    receiver = Receiver(
        tmp_path / "b",
        replace(QUICK, storage=timedelta(seconds=0.5)),
        StorageFault(operation=5, kind=StorageFaultKind.KILL),
        on_kill=lambda: answers.wait(60),
    )
    stack.callback(receiver.close)
    stack.callback(answers.set)
    sending = Sending(own, receiver)
    for _ in range(2):
        with pytest.raises(PeerRefused, match="does not answer"):
            sending.send(1)
    answers.set()
    wait_until(lambda: not_raised(lambda: sending.send(1)), "the copy never came")
    assert_copied(own, receiver, 1)


def not_raised(work: Callable[[], None]) -> bool:
    try:
        work()
    except PeerError:
        return False
    return True


def test_too_many_copies_at_once_are_put_off(own: Path, receiver: Receiver) -> None:
    assert receiver.table is not None
    links = Links()
    copy_plan = CopyPlan.read(LocalStorage(own), 1)
    contents = [copy_plan.manifest_bytes, *copy_plan.index_bytes.values()]
    open_links = []
    for number in range(RECEIVERS):
        link = connect(receiver.table, "a", receiver.peer, replace(QUICK, silence=timedelta(60)), links)
        open_links.append(link)
        offer = Offer(
            source_host=f"o{number}", step=1, save_id=copy_plan.save_id, ranks=tuple(copy_plan.index_bytes),
            sizes=tuple(map(len, contents)),
        )  # fmt: skip
        link.send(offer, *contents)
        assert isinstance(link.receive_answer(), Wanted)
        if number % 4 == 3:  # the others hear that their owners live
            for other in open_links:
                other.send(PeerHeartbeat())
    sending = Sending(own, receiver)
    with pytest.raises(PeerRefused, match="busy"):
        sending.send(1)
    for link in open_links:
        links.drop(link)
    wait_until(lambda: not_raised(lambda: sending.send(1)), "there is never room again")
    assert_copied(own, receiver, 1)


def test_a_host_that_may_have_no_more_threads_puts_copies_off_and_takes_them_later(
    own: Path, receiver: Receiver
) -> None:
    assert receiver.table is not None
    copy_plan = CopyPlan.read(LocalStorage(own), 1)
    contents = [copy_plan.manifest_bytes, *copy_plan.index_bytes.values()]
    offer = Offer(
        source_host="a", step=1, save_id=copy_plan.save_id, ranks=tuple(copy_plan.index_bytes),
        sizes=tuple(map(len, contents)),
    )  # fmt: skip
    for _ in range(RECEIVERS + 1):
        links = Links()
        link = connect(receiver.table, "a", receiver.peer, QUICK, links)
        threading.stack_size(1 << 50)  # more than there are addresses: no thread can begin
        try:
            link.send(offer, *contents)
            answer = link.receive_answer()
        finally:
            threading.stack_size(0)
            links.drop(link)
        assert isinstance(answer, ConnectionRefused)
        assert answer.why == "busy"
    Sending(own, receiver).send(1)
    assert_copied(own, receiver, 1)


def test_the_bandwidth_cap_holds_until_hurry(
    own: Path, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    sending = Sending(own, receiver, bytes_per_s=1)  # years
    done = threading.Event()
    failures: list[Exception] = []

    def send() -> None:
        try:
            sending.send(2)
        except Exception as error:
            failures.append(error)
        done.set()

    thread = threading.Thread(target=send)
    thread.start()
    # Longer than anybody's patience: beats keep the connection while the cap holds.
    assert not done.wait(QUICK.silence.total_seconds() * 1.5)
    assert sending.throttle.sent_bytes <= 4 << 20
    sending.throttle.lift()
    assert done.wait(60)
    thread.join()
    assert failures == []
    assert "Going on after" not in caplog.text
    assert_copied(own, receiver, 2)


def test_the_throttle_lets_through_what_it_was_told() -> None:
    throttle = Throttle(1 << 20)
    began = time.monotonic()
    for _ in range(6):
        throttle.wait(64 << 10, 1.0, lambda: None)
    assert time.monotonic() - began >= 5 / 16


def test_later_bytes_do_not_pay_for_what_passed_while_the_limit_was_lifted() -> None:
    throttle = Throttle(1)
    passed = threading.Event()

    def move() -> None:
        throttle.wait(LARGE)
        throttle.lift()
        for _ in range(100):
            throttle.wait(LARGE)
        throttle.restore()
        throttle.wait(LARGE)
        passed.set()
        throttle.wait(LARGE)  # pays for the one before, for months

    thread = threading.Thread(target=move, daemon=True)
    thread.start()
    assert passed.wait(60)
    thread.join(0.2)
    assert thread.is_alive(), "the limit does not count again"
    throttle.lift()
    thread.join(60)
    assert not thread.is_alive()


def test_another_limit_counts_at_once() -> None:
    throttle = Throttle(1)
    throttle.wait(LARGE, 1.0, lambda: None)  # the next one has to wait for months
    done = threading.Event()

    def wait() -> None:
        throttle.wait(LARGE, 60.0, lambda: None)
        done.set()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    throttle.bytes_per_s = 1  # as it was
    assert not done.wait(0.2)
    throttle.bytes_per_s = 1 << 40
    assert done.wait(60)
    thread.join()
    later = threading.Thread(target=throttle.wait, args=(LARGE, 60.0, lambda: None), daemon=True)
    later.start()
    later.join(60)
    assert not later.is_alive(), "it waits for what was never sent"


def test_a_receiver_that_answers_nothing_while_it_takes_all_is_given_up(
    own: Path, receiver: Receiver
) -> None:
    """A host whose process hangs after the handshake, with a kernel that still takes bytes."""
    listener = socket.create_server(("127.0.0.1", 0))
    release = threading.Event()

    def hang() -> None:
        connection, _ = listener.accept()
        with Link(connection, CallDeadline(silence=timedelta(seconds=60))) as link:
            admit(link, lambda: receiver.table, "b")
            _, size = link.receive()
            link.receive_bytes(memoryview(bytearray(size)))
            link.send(Wanted(ranges=((0, 0, 3),)))
            release.wait(60)

    thread = threading.Thread(target=hang)
    thread.start()
    try:
        with pytest.raises(PeerError):
            # The next tries find nobody who accepts.
            Sending(own, receiver).send(2, port=listener.getsockname()[1])
    finally:
        release.set()
        thread.join()
        listener.close()


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOMEM, NO_THREAD], ids=["EIO", "ENOMEM", "no-thread"])
@pytest.mark.parametrize("where", ["owner", "receiver"])
def test_an_error_of_the_system_at_any_call_of_either_host_ends_the_copy_by_name_and_at_once(
    own: Path, receiver: Receiver, where: str, number: int
) -> None:
    call, hit, failures = 0, True, 0
    before, sending = tree(own), Sending(own, receiver, timeouts=CALM)
    accepts = next(thread for thread in threading.enumerate() if thread.name == "resiliency-peer-accept")
    root, side = (own, "") if where == "owner" else (receiver.root, accepts.name)
    while hit:
        with nothing_leaks():
            with SystemFault(root, number, call=call, thread=side) as fault:
                try:
                    sending.send(1, source_host=f"a{call}")
                    why = ""
                except (CheckpointError, PeerError) as error:
                    why = str(error)
            sending.send(1, source_host=f"a{call}")  # what has come is kept open for it
        assert "moved no byte" not in why, "it waited for the other host in vain"
        failures += bool(why)
        hit, call = fault.hit, call + 1
        assert tree(own) == before
    assert failures > (5 if number != NO_THREAD else 1 if where == "receiver" else -1)
