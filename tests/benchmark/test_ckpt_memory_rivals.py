# SPDX-License-Identifier: Apache-2.0
"""The optional contestants bring back what they saved, from where they say, and leave nothing on the host."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from ckpt_cells import Cell, run_cell
from ckpt_contestants import DLROVER, FROM_MEMORY, LM_RESILIENCY, NVRX_FORKED, NVRX_LOCAL, OPTIONAL
from ckpt_groups import Groups
from ckpt_launchers import launcher

SEGMENTS, SOCKETS = Path("/dev/shm"), Path("/tmp/ckpt_sock")  # noqa: S108


@pytest.fixture(scope="module")
def groups() -> Iterator[Groups]:
    with Groups() as groups:
        yield groups


def skip_unless_installed(contestant: str) -> None:
    package = OPTIONAL[contestant]
    pytest.importorskip(package, reason=f"rivals: {package} is not installed: pip install -e '.[compare]'")


# The one that starts a Python of its own for each rank has one rank, since the imports take their time.
@pytest.mark.thorough("rivals of a benchmark")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("contestant", "ranks"), [(DLROVER, 2), (NVRX_LOCAL, 1), (NVRX_FORKED, 2), (LM_RESILIENCY, 2)]
)
def test_a_new_process_gets_the_bytes_that_were_saved(
    contestant: str, ranks: int, groups: Groups, tmp_path: Path
) -> None:
    skip_unless_installed(contestant)
    # A restore compares each rank's bytes with what it saved, and where they came from with what was asked.
    result = run_cell(groups, Cell(8 << 20, ranks), [contestant], 1, tmp_path, lambda _: None)
    outcome = result.outcomes[contestant]
    assert outcome.error == ""
    assert outcome.series["disk_restore_s"][0] > 0
    assert ("memory_restore_s" in outcome.series) == (contestant in FROM_MEMORY)
    assert outcome.series["durable_s"][0] > outcome.series["held_alone_s"][0] > 0
    assert list(tmp_path.iterdir()) == []


def test_sockets_and_memory_of_a_dlrover_job_are_gone_after_it(tmp_path: Path) -> None:
    skip_unless_installed(DLROVER)
    job = tmp_path / uuid.uuid4().hex
    job.mkdir()
    segment = SEGMENTS / f"{job.name}_ckpt_shm_0"
    with launcher(DLROVER, job) as env:
        assert env["TORCHELASTIC_RUN_ID"] == job.name
        assert any((SOCKETS / job.name).iterdir())
        segment.touch()  # as a rank makes it, which may be killed
    assert not (SOCKETS / job.name).exists()
    assert not segment.exists()
