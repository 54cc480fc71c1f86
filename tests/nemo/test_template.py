# SPDX-License-Identifier: Apache-2.0
"""What NeMo's imports read of a program's variables is that of each forked one, and none prints of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from resiliency.testing import warm

RANKS = """
from lightning.fabric.utilities.rank_zero import rank_zero_only
from torchmetrics.utilities.prints import rank_zero_only as of_metrics
from nemo.lightning.callback_group import CallbackGroup
from nemo.utils import logging
from nv_one_logger.training_telemetry.api.training_telemetry_provider import TrainingTelemetryProvider

assert CallbackGroup.get_instance().callbacks and TrainingTelemetryProvider.instance().one_logger_ready
print(rank_zero_only.rank, of_metrics.rank, logging.rank)
"""

FILES = """
import inspect, tempfile
from modelopt.torch.export import model_config_export, unified_export_hf, unified_export_megatron
import pulp
exports = (
    model_config_export.export_tensorrt_llm_checkpoint,
    unified_export_hf.export_hf_checkpoint,
    unified_export_megatron.export_mcore_gpt_to_hf,
)
found = {inspect.signature(one).parameters["export_dir"].default for one in exports}
print(*{*found, pulp.LpSolverDefault.tmpDir, tempfile.gettempdir()})
"""


#: What NeMo's stack draws from chance or reads of its process at import.
OWN = """
import os
import multiprocess, transformers.utils.hub, wandb
from datasets.fingerprint import generate_random_fingerprint
from numpy.testing._private import utils

assert wandb.Settings().x_stats_pid == os.getpid()
assert utils.memusage.__defaults__ == (f"/proc/{os.getpid()}/stat",)
assert multiprocess.process.ORIGINAL_DIR == os.getcwd()
key = multiprocess.current_process().authkey.hex()
print(generate_random_fingerprint(), transformers.utils.hub.SESSION_ID, key)
"""


pytestmark = [pytest.mark.nemo, pytest.mark.usefixtures("forked")]


@pytest.fixture
def forked(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """The test's programs are forked from the warm interpreter; else its log has the reason."""
    caplog.set_level("INFO", warm.__name__)
    yield
    assert caplog.get_records("call") == []


@pytest.mark.parametrize(("rank", "shown"), [(0, "0 0 0\n"), (1, "1 1 UNK\n")])
def test_nemo_in_a_forked_rank_has_the_ranks_own_numbers(rank: int, shown: str) -> None:
    env = dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    done = warm.run([sys.executable, "-c", RANKS], timeout=600, env=env, check=True)
    assert (done.stdout, done.stderr) == (shown, "")


def test_what_nemos_stack_drew_at_import_is_each_ranks_own(tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        done = warm.run([sys.executable, "-c", OWN], timeout=600, cwd=tmp_path)
        assert done.stderr == ""
        found.append({*done.stdout.split()})
    assert [len(words) for words in found] == [3, 3]
    assert not found[0] & found[1]


def test_a_forked_program_without_nemo_sees_and_prints_nothing_of_it() -> None:
    done = warm.run([sys.executable, "-c", "print('mine')"], timeout=600)
    assert (done.stdout, done.stderr) == ("mine\n", "")


def test_a_forked_program_with_a_directory_for_temporary_files_of_its_own_uses_it_throughout(
    tmp_path: Path,
) -> None:
    done = warm.run([sys.executable, "-c", FILES], timeout=600, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert (done.stdout, done.stderr) == (f"{tmp_path}\n", "")
