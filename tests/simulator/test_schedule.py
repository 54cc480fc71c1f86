# SPDX-License-Identifier: Apache-2.0
"""The same seed and size give the same schedule everywhere, and its times are those of a Poisson process."""

from __future__ import annotations

import functools
import hashlib
import io
import itertools
import math
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import pytest

from resiliency.errors import ConfigError
from simulator import session
from simulator.command_line import parse
from simulator.draws import Draws
from simulator.faults import RULES, Kind, PlannedFault, kind_named, microseconds, seconds
from simulator.published import publication, publications
from simulator.schedule import Poisson, Shape, Share, read_trace, rows_of_flag, schedule

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).with_name("golden.csv")
#: What made the golden file: every kind, a fixed fault and drawn places.
GOLDEN_FLAGS = [
    *(
        "--nnodes",
        "3",
        "--gpus_per_node",
        "4",
        "--seed",
        "7",
        "--duration_s",
        "400",
        "--fault_interval",
        "12.5",
    ),
    *("--kinds", ",".join(f"{kind.value}={2 + index}" for index, kind in enumerate(Kind))),
    *("--at", "100,kill", "--at", "250.5,stop,node=2,gpu=3,duration=7"),
]
LASTS = dict.fromkeys(Kind, 30_000_000)


def poisson(mean_s: str, *shares: Share, seed: int = 1) -> Poisson:
    chosen = shares or (Share(Kind.KILL),)
    return Poisson(mean_us=Fraction(mean_s) * 1_000_000, shares=chosen, seed=seed, lasts_us=LASTS)


def shape(nnodes: int = 4, gpus_per_node: int = 8, length_s: int = 100_000) -> Shape:
    return Shape(nnodes=nnodes, gpus_per_node=gpus_per_node, length_us=length_s * 1_000_000)


@functools.cache
def twenty_thousand() -> tuple[PlannedFault, ...]:
    """Three kills for each slow-down, every five seconds on average, on 32 devices."""
    return tuple(schedule([poisson("5", Share(Kind.KILL, 3), Share(Kind.SLOW, 1))], shape()))


def faults_of(flags: Sequence[str]) -> list[PlannedFault]:
    options = parse([*flags, "--job", "j"], {})
    return schedule(options.sources, options.shape)


def printed(flags: Sequence[str]) -> str:
    options = parse([*flags, "--dry_run"], {})
    out = io.StringIO()
    session._print_schedule(schedule(options.sources, options.shape), options, out)
    return out.getvalue()


def test_the_schedule_is_the_golden_one() -> None:
    assert printed(GOLDEN_FLAGS) == GOLDEN.read_text()


def test_every_python_that_is_here_prints_the_golden_schedule() -> None:
    """CI's own is one of them: a schedule must not depend on it."""
    argv = ["simulator/simulator_entrypoint.py", *GOLDEN_FLAGS, "--dry_run"]
    for minor in range(10, 16):
        program = shutil.which(f"python3.{minor}")
        probe = [program or "false", "-c", ""]  # the name may be there for a version that is not chosen
        if subprocess.run(probe, capture_output=True, timeout=60, check=False).returncode == 0:
            done = subprocess.run(
                [str(program), *argv], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
            )
            assert done.stdout == GOLDEN.read_text(), program


def test_other_processes_and_nodes_print_the_same_bytes() -> None:
    texts = set()
    for node, hashes in (("0", "1"), ("2", "2")):
        done = subprocess.run(
            [
                sys.executable,
                "simulator/simulator_entrypoint.py",
                *GOLDEN_FLAGS,
                "--dry_run",
                "--node_rank",
                node,
            ],
            cwd=ROOT,
            env={"PATH": os.environ["PATH"], "PYTHONHASHSEED": hashes},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        texts.add(done.stdout)
    assert texts == {GOLDEN.read_text()}


def test_another_seed_or_another_size_is_another_schedule() -> None:
    flags = ["--kinds", "kill", "--nnodes", "3"]
    texts = {
        printed([*flags, *more])
        for more in ([], ["--seed", "1"], ["--gpus_per_node", "4"], ["--nnodes", "4"])
    }
    assert len(texts) == 4


def test_the_order_of_flags_changes_nothing() -> None:
    assert printed(["--kinds", "kill=3,stop"]) == printed(["--kinds", "stop", "--kinds", "kill=3"])


def test_a_fault_at_a_fixed_time_moves_no_drawn_one() -> None:
    drawn = printed(["--kinds", "kill,slow"]).splitlines()[2:]
    more = printed(["--kinds", "kill,slow", "--at", "7,kill"]).splitlines()[2:]
    assert [line for line in more if line not in drawn] == [next(iter(set(more) - set(drawn)))]


def test_what_is_printed_is_read_back_as_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(GOLDEN.read_text())
    flags = ["--nnodes", "3", "--gpus_per_node", "4", "--duration_s", "400", "--trace", str(path)]
    assert printed(flags).splitlines()[1:] == GOLDEN.read_text().splitlines()[1:]


def test_a_recorded_trace_is_sped_up_and_its_empty_places_are_drawn(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("time_s,kind,cause\n# a note\n3600,kill,Faulty GPU\n7200,stop,Hang\n999999,kill,Late\n")
    options = parse(
        ["--trace", str(path), "--speed", "60", "--duration_s", "130", "--nnodes", "2"],
        {"JOB_IDENTIFIER": "j"},
    )
    faults = schedule(options.sources, options.shape)
    assert [(seconds(fault.at_us), fault.cause) for fault in faults] == [
        ("60.000000", "Faulty GPU"),
        ("120.000000", "Hang"),
    ]
    assert all(fault.node < 2 and fault.gpu is not None for fault in faults)


def test_the_generator_is_the_documented_one() -> None:
    digest = hashlib.sha256(b"42/name/1").digest()
    draws = Draws(42, "name")
    words = [draws.word() for _ in range(8)]
    assert words[4:] == [int.from_bytes(digest[at : at + 8], "big") for at in (0, 8, 16, 24)]
    word = words[0]
    assert Draws(42, "name").below(10) == word % 10
    wait = Draws(42, "name").exponential_us(Fraction(1_000_000))
    assert wait == pytest.approx(-math.log((word + 1) / 2**64) * 1e6, abs=1.0)


def test_gaps_are_exponential_and_independent() -> None:
    faults = twenty_thousand()
    gaps = [(b.at_us - a.at_us) / 5e6 for a, b in itertools.pairwise(faults)]
    number = len(gaps)
    assert 19_000 < number < 21_000
    mean = sum(gaps) / number
    assert abs(mean - 1) < 4 / math.sqrt(number)
    # Kolmogorov-Smirnov at 0.1 %: the largest distance between the two distributions.
    ordered = sorted(gaps)
    distance = max(
        max((index + 1) / number - (1 - math.exp(-gap)), (1 - math.exp(-gap)) - index / number)
        for index, gap in enumerate(ordered)
    )
    assert distance < 1.95 / math.sqrt(number)
    lagged = sum((a - mean) * (b - mean) for a, b in itertools.pairwise(gaps)) / number
    assert abs(lagged) < 4 / math.sqrt(number)


def test_counts_in_windows_vary_as_much_as_their_mean() -> None:
    counts = Counter(fault.at_us // 50_000_000 for fault in twenty_thousand())
    windows = [counts[window] for window in range(2000)]
    mean = sum(windows) / len(windows)
    variance = sum((count - mean) ** 2 for count in windows) / (len(windows) - 1)
    assert abs(variance / mean - 1) < 4 * math.sqrt(2 / len(windows))


def test_devices_are_drawn_evenly_and_kinds_by_weight() -> None:
    faults = twenty_thousand()
    places = Counter((fault.node, fault.gpu) for fault in faults)
    expected = len(faults) / 32
    assert len(places) == 32
    # Chi-square with 31 degrees of freedom at 0.1 %.
    assert sum((count - expected) ** 2 / expected for count in places.values()) < 61.1
    kills = sum(fault.kind is Kind.KILL for fault in faults) / len(faults)
    assert abs(kills - 0.75) < 4 * math.sqrt(0.75 * 0.25 / len(faults))


def test_schedules_of_neighbouring_seeds_have_nothing_in_common() -> None:
    def draws(seed: int, name: str) -> list[float]:
        stream = Draws(seed, name)
        return [stream.word() / 2**64 - 0.5 for _ in range(10_000)]

    one = draws(1, "poisson")
    for other in (draws(2, "poisson"), draws(1, "rows")):
        # Of independent uniform draws the sum of products has a deviation of sqrt(n) / 12.
        assert abs(sum(a * b for a, b in zip(one, other, strict=True))) < 4 * math.sqrt(len(one)) / 12


def test_the_kind_of_a_fault_tells_nothing_of_its_place() -> None:
    faults = twenty_thousand()
    kills = Counter(fault.gpu for fault in faults if fault.kind is Kind.KILL)
    total = Counter(fault.gpu for fault in faults)
    share = sum(kills.values()) / len(faults)
    # Chi-square with 7 degrees of freedom at 0.1 %.
    assert sum((kills[gpu] - share * n) ** 2 / (share * (1 - share) * n) for gpu, n in total.items()) < 24.3


def test_the_mean_of_one_gpu_is_divided_by_the_gpus() -> None:
    flags = ["--kinds", "kill", "--nnodes", "10", "--gpus_per_node", "8", "--duration_s", "10000"]
    numbers = [
        len(printed([*flags, *more]).splitlines()) - 2
        for more in (["--mtbf_gpu_s", "800"], ["--mtbf_host_s", "100"], ["--fault_interval", "10"])
    ]
    assert numbers[0] == numbers[1] == numbers[2]
    assert 900 < numbers[0] < 1100


def test_ten_thousand_nodes_take_seconds() -> None:
    began = time.monotonic()
    faults = schedule([poisson("0.000125")], shape(nnodes=10_000, length_s=6))
    assert 46_000 < len(faults) < 50_000
    assert len({fault.node for fault in faults}) > 9_000
    # A second or two; the limit is for a machine that does other things.
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("name", list(publications()))
def test_a_publication_has_its_source_and_only_kinds_that_exist(name: str) -> None:
    found = publication(name)
    assert "arXiv" in found.source
    assert all(share.weight > 0 and share.cause for share in found.shares)
    faults = schedule([poisson("1", *found.shares)], shape(length_s=5000))
    assert {fault.cause for fault in faults} <= {share.cause for share in found.shares}


def test_the_counts_of_llama_3_are_those_of_its_table() -> None:
    found = publication("llama3")
    assert float(found.gpu_mean_us / 16_384) / 3.6e9 == pytest.approx(54 * 24 / 419)
    # Table 5 from top to bottom.
    counts = [148, 72, 54, 35, 32, 19, 17, 7, 7, 6, 6, 3, 3, 2, 2, 2, 2, 2]
    assert [share.weight for share in found.shares] == counts
    assert sum(counts) == 419


def test_only_figures_that_a_table_of_their_source_states_are_here() -> None:
    """Not a figure that was read off a plot, or whose causes are taken as equally frequent."""
    assert all(", table " in found.source for found in publications().values())


def test_a_small_machine_plays_a_large_job_faster() -> None:
    flags = ["--profile", "llama3", "--as_gpus", "16384", "--speed", "1000", "--duration_s", "20000"]
    faults = len(printed(flags).splitlines()) - 4
    assert faults == pytest.approx(20_000 * 1000 / (54 * 86_400 / 419), rel=0.1)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("when,what\n1,kill\n", "must name the columns time_s and kind"),
        ("", "found nothing"),
        ("time_s,kind\n1,tired\n", "line 2: 'tired' is no kind of fault"),
        ("time_s,kind\nsoon,kill\n", "line 2: time_s must be seconds, found 'soon'"),
        ("time_s,kind\n-1,kill\n", "time_s must be zero or more"),
        ("time_s,kind\n# x\n1\n", "line 3: it has not 2 fields"),
        ("time_s,kind\n\n# x\n1\n", "line 4: it has not 2 fields"),
        ("time_s,kind,node\n1,kill,9\n", "there is no node 9"),
        ("time_s,kind,gpu\n1,kill,8\n", "GPU 8: the job has 1 nodes with 8 GPUs"),
        ("time_s,kind,node\n1,kill,one\n", "node must be a whole number"),
        ("time_s,kind,gpu\n1,memory,0\n", "memory strikes a host and has no GPU"),
        ("time_s,kind,duration_s\n1,kill,3\n", "kill has no duration"),
        ("time_s,kind,duration_s\n1,stop,0\n", "stop needs a duration above zero"),
        ("time_s,kind,value\n1,slow,100\n", "percent of one CPU, is 1 to 99, found 100"),
        ("time_s,kind,value\n1,kill,1\n", "kill has no value"),
    ],
)
def test_a_trace_that_cannot_be_is_refused_with_its_line(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        faults_of(["--trace", str(path)])
    assert sentence in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_trace_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read it: .*No such file"):
        read_trace(tmp_path / "none.csv")


@pytest.mark.parametrize("text", ["5", "5,kill,rank=1", "5,kill,node=0,node=1", "5,kill,node"])
def test_a_fixed_fault_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--at"):
        faults_of(["--at", text])


def test_the_page_shows_what_its_command_prints() -> None:
    page = (ROOT / "docs" / "simulator.md").read_text()
    block = page.partition("```text\n$ python3 simulator/simulator_entrypoint.py ")[2].partition("```")[0]
    flags, _, output = block.replace("\\\n", "").partition("\n")
    assert printed(flags.split()) == output
    assert all(f"| `{kind.value}` |" in page for kind in Kind)
    assert all(f"| `{name}` |" in page for name in publications())


def test_every_kind_has_a_rule_and_a_line_in_the_help() -> None:
    from simulator.command_line import EPILOG

    assert set(RULES) == set(Kind)
    assert all(f"\n  {kind.value} " in EPILOG for kind in Kind)
    assert kind_named("kill") is Kind.KILL
    assert microseconds("1.5", "x") == 1_500_000
    assert rows_of_flag(["5,kill,gpu=1"])[0][1] == {"time_s": "5", "kind": "kill", "gpu": "1"}


def test_a_fault_says_what_it_is() -> None:
    fault = PlannedFault(
        at_us=1_500_000, kind=Kind.POWER_CAP, node=1, gpu=2, duration_us=30_000_000, value=300
    )
    assert fault.text == "power_cap (300 watts) of node 1 gpu 2 at 1.500000 s for 30.000000 s"
