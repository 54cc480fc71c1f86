# SPDX-License-Identifier: Apache-2.0
"""Which saves count after rollbacks, beside a model that keeps the whole path of each save."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resiliency.checkpoint.branches import (
    RECORD,
    Branch,
    Branches,
    read_branches,
    record_branches,
)
from resiliency.checkpoint.format.catalog import needless_steps
from resiliency.checkpoint.names import attempt_on_branch, branch_number, save_id_of
from resiliency.errors import CheckpointCorrupt
from resiliency.testing.storage import MemoryStorage

#: A save; or a rollback to the save with that number, counted from the newest, left ones included; or one
#: that a launcher asks for, behind so many of the newest steps of the path.
events = st.one_of(st.just("save"), st.integers(0, 8), st.integers(-4, -1))
histories = st.lists(events, min_size=1, max_size=30)


@given(history=histories)
def test_what_counts_after_any_rollbacks_is_the_path_of_the_newest_save(history: list[str | int]) -> None:
    branches, saves, path = Branches(), [], [(0, "start-0")]
    paths = {}
    for event in history:
        if event == "save":
            step = path[-1][0] + 1
            save = step, save_id_of(attempt_on_branch("start", branches.newest), step)
            path = [*path, save]
            # What stood at that step was left, and is replaced.
            saves = [other for other in saves if other[0] != step or other[1] == save[1]] + [save]
            paths[save] = path
        elif int(event) < 0:
            last = max(path[-1][0] + int(event), 0)
            asked = Branches(((Branch(branches.newest + 1, branches.newest, last)),))
            branches, path = branches.merged(asked), path[: last + 1]
            assert branches.merged(asked) == branches
        elif saves:
            step, name = saves[-1 - int(event) % len(saves)]
            branches, path = branches.after(step, name), paths[step, name]
        assert {save for save in saves if branches.is_live(*save)} == set(path[1:]) & set(saves)
    for save in saves:
        if not branches.is_live(*save):
            common = [step for step, name in paths[save] if (step, name) in path]
            assert branches.left_after(*save) == max(common)
    assert Branches.of_rows(branches.as_rows()) == branches


def test_the_name_of_an_attempt_says_its_branch() -> None:
    assert branch_number(save_id_of(attempt_on_branch("ab.3", 12), 40)) == 12
    assert attempt_on_branch("ab.3", 0) == "ab"
    assert [branch_number(name) for name in ("ab-40", "", "run.x-1", "a.b.c")] == [0, 0, 0, 0]


def test_where_the_record_of_a_branch_is_lost_all_that_was_saved_before_counts() -> None:
    branches = Branches((Branch(1, 0, 10),)).with_seen(["a-10", "a.1-11", "a.3-14"])
    assert branches.newest == 3
    assert [
        branches.is_live(*save) for save in [(10, "a-10"), (11, "a-11"), (11, "a.1-11"), (14, "a.3-14")]
    ] == [
        True,
        False,
        True,
        True,
    ]


def test_the_record_grows_and_a_damaged_one_is_refused() -> None:
    storage = MemoryStorage()
    assert read_branches(storage).left_steps({1: "a-1"}) == {}
    first = Branches().after(1, "a-1")
    record_branches(storage, first)
    record_branches(storage, Branches((Branch(2, 1, 1),)))
    assert read_branches(storage).known == (Branch(1, 0, 1), Branch(2, 1, 1))
    assert storage.list("") == [RECORD]
    saves = {1: "a-1", 2: "a-2", 3: "a.1-3", 4: "a.2-4"}
    assert read_branches(storage).left_steps(saves) == {2: 1, 3: 1}
    file = storage.create(RECORD)
    file.write_at(0, b"{}")
    file.close()
    with pytest.raises(CheckpointCorrupt, match=RECORD):
        read_branches(storage)


@pytest.mark.parametrize(
    ("committed", "left", "goes"),
    [
        ([1, 2, 3], {}, [1]),
        ([1, 2, 5], {5: 2}, []),  # the live branch has two, both of before
        ([1, 2, 3, 5], {5: 2}, [1]),  # two, one of them since
        ([1, 2, 3, 4, 5], {5: 2}, [1, 2, 5]),
        ([4, 5], {4: 0, 5: 0}, []),  # the last ones that there are
    ],
)
def test_the_newest_two_of_the_live_branch_stay_and_the_left_go_when_it_has_two_since(
    committed: list[int], left: dict[int, float], goes: list[int]
) -> None:
    assert needless_steps(committed, left, 2) == goes
