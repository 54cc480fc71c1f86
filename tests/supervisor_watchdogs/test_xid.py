# SPDX-License-Identifier: Apache-2.0
"""Xids are found in every form that a kernel log has, and in nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.policy.xid import Remedy, remedy, worst
from supervisor.values import EventType, Evidence, Finding
from supervisor.watchdogs.kernel_log import Line
from supervisor.watchdogs.watchdog import Cooldown, Look, UnknownHealth, gravest
from supervisor.watchdogs.xid import Xid, XidWatchdog, find_xids, parse_xid

# Lines as drivers of several generations wrote them.
RECORDED = [
    (
        "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
        Xid(device="0000:3b:00", code=79),
    ),
    (
        "NVRM: Xid (PCI:0000:5C:00): 31, pid=4711, name=python3, Ch 00000010, intr 00000000. MMU Fault: "
        "ENGINE GRAPHICS GPCCLIENT_T1_0 faulted @ 0x7f1c_9a000000. Fault is of type FAULT_PDE",
        Xid(device="0000:5c:00", code=31),
    ),
    ("NVRM: Xid (0000:03:00): 13, Graphics Exception: ESR 0x505730=0x0", Xid(device="0000:03:00", code=13)),
    (
        "NVRM: Xid (PCI:0000:01:00 GPU-I:05): 94, pid=7194, Contained: SM (0x1). RST: No, D-RST: No",
        Xid(device="0000:01:00", code=94),
    ),
    ("NVRM: Xid (PCI:00000009:01:00): 48, pid=1, DBE (double bit error)", Xid(device="0009:01:00", code=48)),
    (
        "NVRM: Xid (PCI:0000:18:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot "
        "Required)",
        Xid(device="0000:18:00", code=154, advice="node_reboot"),
    ),
    (
        "NVRM: Xid (PCI:0000:18:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) "
        "to 0x0 (None)",
        Xid(device="0000:18:00", code=154, advice="none"),
    ),
    (
        "NVRM: Xid (PCI:0000:18:00): 145, RLW_SRC_TRACK Nonfatal XC0 i0 Link 08 (0x00000007 0x00000000)",
        Xid(device="0000:18:00", code=145),
    ),
    ("NVRM: Xid (PCI:0000:18:00): 154, in words of a newer driver", Xid(device="0000:18:00", code=154)),
    ("NVRM: Xid (PCI:0000:18:00): 63", Xid(device="0000:18:00", code=63)),
]
PREFIXES = [
    "",
    "[1234567.890123] ",
    "[Mon Nov 23 09:28:01 2026] ",
    "Nov  3 09:28:01 gke-a3-pool-1 kernel: ",
    "Nov 23 09:28:01 gke-a3-pool-1 kernel: [12345.678901] ",
    "2026-11-23T09:28:01.123456+00:00 host-1 kernel: [   12.678901] ",
    "3,1724,9274910401,-;",
]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_recorded_lines_are_understood_behind_every_prefix(prefix: str) -> None:
    assert [parse_xid(prefix + text) for text, _ in RECORDED] == [xid for _, xid in RECORDED]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  570.86.15",
        "NVRM: Xid (PCI:0000:3b:00):",
        "NVRM: Xid (PCI:0000:3b:00): x79, y",
        "NVRM: Xid (PCI:0000:3b): 79, y",
        "NVRM: Xid (PCI:0000:3b:00): 79000000, y",
        "Nov 23 09:28:01 host-1 myapp[77]: NVRM: Xid (PCI:0000:3b:00): 79, spoofed by a program's log",
        "Nov 23 09:28:01 host-1 myapp[77]: kernel: NVRM: Xid (PCI:0000:3b:00): 79, spoofed",
        'audit: type=1400 comm="NVRM: Xid (PCI:0000:3b:00): 79, x"',
        "NVRM: Xi",
        "Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.",
    ],
)
def test_other_lines_torn_ones_and_those_of_other_programs_are_none(text: str) -> None:
    assert parse_xid(text) is None


@given(st.integers(0, 999), st.integers(0, 255), st.text(st.characters(blacklist_categories=("Cs", "Cc"))))
def test_a_generated_line_of_any_code_is_understood(code: int, bus: int, why: str) -> None:
    found = parse_xid(f"NVRM: Xid (PCI:0000:{bus:02X}:00): {code}, {why}")
    assert found is not None
    assert (found.device, found.code) == (f"0000:{bus:02x}:00", code)


@given(st.text(max_size=200))
def test_any_text_is_read_without_an_error(text: str) -> None:
    parse_xid(text)
    parse_xid("NVRM: Xid " + text)


# ---------------------------------------------------------------- findings


def lines(*texts: str) -> list[Line]:
    return [Line(f"b-{n}", text, 1.0) for n, text in enumerate(texts)]


def xid(code: int, bus: int = 0x3B, why: str = "why") -> str:
    return f"NVRM: Xid (PCI:0000:{bus:02x}:00): {code}, {why}"


def test_each_xid_is_a_finding_with_the_gpu_it_speaks_of() -> None:
    first, second = find_xids("host-1", lines(xid(31), "usb 1-1: new device", xid(79, 0x5E)))
    assert (first.type, first.evidence.code, first.evidence.device) == (EventType.XID, 31, "0000:3b:00")
    assert (second.evidence.code, second.evidence.device) == (79, "0000:5e:00")
    assert (second.evidence.id, second.evidence.age_s) == ("host-1/xid/b-2", 1.0)


def test_the_drivers_advice_goes_with_the_xids_of_its_gpu_before_it() -> None:
    advice = "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"
    found = find_xids("h", lines(xid(79), xid(79, 0x5E), xid(154, why=advice), xid(31)))
    assert [(one.evidence.code, one.evidence.advice) for one in found] == [
        (79, "gpu_reset"),
        (79, ""),
        (154, "gpu_reset"),
        (31, ""),
    ]
    assert remedy(79, found[0].evidence.advice) is Remedy.RESET_GPU


def test_advice_to_do_nothing_takes_no_xid_back() -> None:
    advice = "GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"
    found = find_xids("h", lines(xid(79), xid(154, why=advice)))
    assert worst((one.evidence.code or 0, one.evidence.advice) for one in found) is Remedy.OUT_OF_SERVICE


def test_a_log_that_comes_later_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "kern.log"
    watchdog = XidWatchdog("h", str(path), {})
    with pytest.raises(UnknownHealth, match=r"kern\.log cannot be read: No such file or directory"):
        watchdog.look()
    path.write_text(xid(79) + "\n")
    (found,) = watchdog.look().findings
    assert found.evidence.code == 79
    again = XidWatchdog("h", str(path), watchdog.memory())
    assert again.look().findings == ()
    for one in (watchdog, again):
        one.close()


# ---------------------------------------------------------------- cool-down


def finding(code: int, device: str = "gpu-0", number: int = 0) -> Finding:
    evidence = Evidence(id=f"{device}-{code}-{number}", witness="xid", text="t", code=code, device=device)
    return Finding(type=EventType.XID, evidence=evidence)


def told(cooldown: Cooldown, now: float, *found: Finding) -> list[tuple[int | None, str]]:
    look = cooldown.pass_on(Look(findings=found), now)
    return [(one.evidence.code, one.evidence.text) for one in look.findings]


def test_a_burst_of_one_code_on_one_gpu_is_told_once_and_hides_no_other() -> None:
    cooldown = Cooldown(30.0)
    burst = [finding(13, number=n) for n in range(1000)]
    assert told(cooldown, 0.0, *burst, finding(79), finding(13, "gpu-1")) == [(13, "t"), (79, "t"), (13, "t")]
    assert told(cooldown, 29.0, finding(13)) == []
    assert told(cooldown, 59.0, finding(79)) == [(79, "t")]
    assert told(cooldown, 59.5, finding(13)) == [(13, "t")]


def test_a_repetition_after_the_cooldown_says_how_many_were_held_back() -> None:
    cooldown = Cooldown(30.0)
    told(cooldown, 0.0, *(finding(13, number=n) for n in range(10)))
    assert told(cooldown, 30.0, finding(13)) == [(13, "t (9 more before it)")]


def test_of_a_storm_the_gravest_are_told_in_their_order() -> None:
    storm = [finding(13, f"gpu-{n}") for n in range(100)]
    storm[50], storm[70] = finding(79, "gpu-50"), finding(48, "gpu-70")
    look = Cooldown(30.0).pass_on(Look(findings=tuple(storm)), 0.0)
    codes = [one.evidence.code for one in look.findings]
    assert len(codes) == 32
    assert [code for code in codes if code != 13] == [79, 48]
    assert look.notes == ("100 findings at once; the 32 gravest are reported",)
    assert gravest(storm, 1) == (storm[50],)
