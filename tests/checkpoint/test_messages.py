# SPDX-License-Identifier: Apache-2.0
"""What other processes say is believed if it is a message of the protocol, and else refused in few words."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import ModuleType

import pytest

from resiliency.checkpoint.agent import protocol as wire
from resiliency.checkpoint.messages import decode_record
from resiliency.checkpoint.replication.hosts import HostTable
from resiliency.checkpoint.replication.transport import messages
from resiliency.checkpoint.stop.stop_link import StopMessage
from resiliency.errors import PeerError

PROTOCOLS = pytest.mark.parametrize("protocol", [wire, messages], ids=["agent", "peers"])


def refusal(decode: Callable[[bytes], object], data: bytes) -> str:
    with pytest.raises(PeerError) as refused:
        decode(data)
    return str(refused.value)


def with_fields(message: object, **changes: object) -> bytes:
    encode = wire.encode if isinstance(message, wire.Copies) else messages.encode
    return json.dumps({**json.loads(encode(message)), **changes}).encode()  # type: ignore[arg-type]


@PROTOCOLS
@pytest.mark.parametrize(
    "data",
    [
        b"[" * 30_000,
        b"[" * 30_000 + b"]" * 30_000,
        b'{"kind":' * 10_000 + b"1" + b"}" * 10_000,
        b'{"kind":{}}',
        b'{"kind":"' + b"dance" * 5000 + b'"}',
        b"\xff" * 30_000,
        b"1" * 30_000,
        b"",
    ],
)
def test_what_is_no_message_is_called_so_in_few_words_however_deep_or_long_it_is(
    protocol: ModuleType, data: bytes
) -> None:
    text = refusal(protocol.decode, data)
    assert "not a message" in text
    assert len(text) < 250


@pytest.mark.parametrize(
    ("protocol", "start"),
    [(wire, b'{"kind":"refused","reason":'), (messages, b'{"kind":"proof","proof":')],
    ids=["agent", "peers"],
)
def test_a_nest_that_can_just_be_parsed_is_refused_like_any_other_value(
    protocol: ModuleType, start: bytes
) -> None:
    # To show a nest takes as much of the stack as to parse it, or a little more.
    for depth in range(600, 1100):
        text = refusal(protocol.decode, start + b"[" * depth + b"]" * depth + b"}")
        assert "not a message" in text or "must be str, found [[[" in text


COPIES = wire.Copies(step=3, attempt_id="s", hosts=("a", "b"), complete=True)
DONE = wire.Done(step=3, attempt_id="s", tier="local", error="", size_bytes=1, queued_s=0.5, commit_s=1.0)
WANTED = messages.Wanted(ranges=((0, 1, 2), (3, 4, 5)))


@pytest.mark.parametrize(
    ("message", "changes", "text"),
    [
        (COPIES, {"hosts": "ab"}, "Copies.hosts must be tuple[str, ...], found 'ab'."),
        (COPIES, {"hosts": ["a", 1]}, "Copies.hosts must be tuple[str, ...], found ['a', 1]."),
        (COPIES, {"complete": 1}, "Copies.complete must be bool, found 1."),
        (COPIES, {"step": 3.0}, "Copies.step must be int, found 3.0."),
        (COPIES, {"step": None}, "Copies.step must be int, found None."),
        (WANTED, {"ranges": [[0, 1]]}, "must be tuple[tuple[int, int, int], ...], found [[0, 1]]."),
        (WANTED, {"ranges": [[0, 1, True]]}, "must be tuple[tuple[int, int, int], ...], found"),
        (WANTED, {"ranges": [1]}, "must be tuple[tuple[int, int, int], ...], found [1]."),
        (WANTED, {"more": 1}, "Wanted must have the fields ['ranges'], found ['more', 'ranges']."),
    ],
)
def test_a_field_that_is_not_what_it_must_be_is_named_with_both(
    message: object, changes: dict[str, object], text: str
) -> None:
    decode = wire.decode if isinstance(message, wire.Copies) else messages.decode
    assert text in refusal(decode, with_fields(message, **changes))


def test_a_foreign_value_is_shown_in_part() -> None:
    for value in ("x" * 10_000, ["x" * 1000] * 1000, {"x" * 1000: "y" * 1000}, 10**4000):
        text = refusal(wire.decode, with_fields(COPIES, complete=value))
        assert "Copies.complete must be bool, found " in text
        assert len(text) < 200
    text = refusal(wire.decode, with_fields(COPIES, **{f"field-{number}": 1 for number in range(1000)}))
    assert "Copies must have the fields" in text
    assert len(text) < 250


def test_whole_numbers_are_good_durations_and_tuples_come_back_as_they_were() -> None:
    whole = json.dumps({**json.loads(wire.encode(DONE)), "queued_s": 0, "commit_s": 1}).encode()
    assert wire.decode(whole) == wire.Done(
        step=3, attempt_id="s", tier="local", error="", size_bytes=1, queued_s=0.0, commit_s=1.0
    )
    assert messages.decode(messages.encode(WANTED)) == WANTED
    assert messages.decode(messages.encode(messages.Wanted(ranges=()))) == messages.Wanted(ranges=())


def test_long_texts_are_cut_for_the_agent_and_never_for_other_hosts() -> None:
    said = wire.decode(wire.encode(wire.RequestRefused(reason="x" * 5000)))
    assert said == wire.RequestRefused(reason="x" * wire.TEXT_CHARS)
    sealed = messages.Acknowledged(step=1, save_id="x" * 5000)
    assert messages.decode(messages.encode(sealed)) == sealed


@pytest.mark.parametrize(
    ("record", "data", "found"),
    [
        (StopMessage, "[", "not JSON"),
        (StopMessage, "[" * 30_000, "not JSON"),
        (StopMessage, '{"kind":"stop"}', "left_s"),
        (
            StopMessage,
            '{"kind":"dance","number":1,"left_s":1,"text":""}',
            "StopMessage.kind must be StopKind",
        ),
        (StopMessage, '{"kind":[],"number":1,"left_s":1,"text":""}', "StopMessage.kind must be StopKind"),
        (StopMessage, '{"kind":"stop","number":"1","left_s":1,"text":""}', "StopMessage.number must be int"),
        (
            HostTable,
            '{"session":"s","run_id":"r","token":"t","leader":"a","replicas":1,"bytes_per_s":0,"keep":1,'
            '"peers":[{"host":"a","address":"","port":"7","ranks":[],"domains":[],"groups":[]}]}',
            "Peer.port must be int",
        ),
    ],
)
def test_a_record_that_is_not_what_it_must_be_is_refused_by_field(
    record: type[object], data: str, found: str
) -> None:
    text = refusal(lambda content: decode_record(record, content), data.encode())
    assert found in text
    assert len(text) < 250
