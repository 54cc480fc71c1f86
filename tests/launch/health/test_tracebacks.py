# SPDX-License-Identifier: Apache-2.0
"""The exception that ended a rank is read from what it printed, with those that led to it."""

from __future__ import annotations

import pytest

from resiliency.launch.health.evidence import RankError, read_traceback, with_chain
from resiliency.rank.error_text import END_CHARS

FRAME = '  File "/job/train.py", line 88, in step\n    load()\n'
HEAD = f"Traceback (most recent call last):\n{FRAME}"
STALE = "OSError: [Errno 116] Stale file handle: '/data/0.tar'"
WATCHDOG = "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7) ran for 600042 ms"
ABORTS = f"terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  {WATCHDOG}\n"
WORKER = "RuntimeError: Caught OSError in DataLoader worker process 3."

#: Name -> what a rank printed, its exception, and what led to it.
PRINTED: dict[str, tuple[str, str, list[str]]] = {
    "a name that says nothing of an error": (
        f"{HEAD}socket.gaierror: [Errno -3] Temporary failure in name resolution\n",
        "socket.gaierror: [Errno -3] Temporary failure in name resolution",
        [],
    ),
    "a name without a text": (f"{HEAD}_queue.Empty\n", "_queue.Empty", []),
    "a cause": (
        f"{HEAD}{STALE}\n\nThe above exception was the direct cause of the following exception:\n\n"
        f"{HEAD}datasets.exceptions.DatasetGenerationError: while generating\n",
        "datasets.exceptions.DatasetGenerationError: while generating",
        [STALE],
    ),
    "a context and a cause": (
        f"{HEAD}KeyError: 3\n\nDuring handling of the above exception, another exception occurred:\n\n"
        f"{HEAD}{STALE}\n\nThe above exception was the direct cause of the following exception:\n\n"
        f"{HEAD}RuntimeError: no shard\n",
        "RuntimeError: no shard",
        [STALE, "KeyError: 3"],
    ),
    "an error of a loader worker": (f"{HEAD}{WORKER}\nOriginal {HEAD}{STALE}\n\n", WORKER, [STALE]),
    "an error whose text names others": (
        f"{HEAD}torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94\n"
        "ncclSystemError: System call failed.\nLast error:\nCall to ibv_reg_mr failed\n",
        "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94\n"
        "ncclSystemError: System call failed.\nLast error:\nCall to ibv_reg_mr failed",
        [],
    ),
    "an error, and one that is ignored while the interpreter ends": (
        f"{HEAD}{STALE}\nException ignored in: <function Loader.__del__ at 0x7f>\n{HEAD}AssertionError: x\n",
        STALE,
        [],
    ),
    "an error before an abort": (
        f"{HEAD}{STALE}\n[rank3]:[W1128 03:11:52.9 ProcessGroupNCCL.cpp:1496] Warning: x\n{ABORTS}",
        STALE,
        [],
    ),
    "an error that was handled long before an abort": (
        f"{HEAD}{STALE}\n\nretry 1 of 5\nstep 412\n{ABORTS}",
        f"c10.DistBackendError: {WATCHDOG}",
        [],
    ),
    "colours": (f"\x1b[1;35m{HEAD}\x1b[0m\x1b[1;35m{STALE}\x1b[0m\n", STALE, []),
    "calls that are logged": (f"Stack (most recent call last):\n{FRAME}INFO: slow step\n", "", []),
}


@pytest.mark.parametrize(("text", "error", "chain"), PRINTED.values(), ids=PRINTED)
def test_an_exception_is_read_from_what_a_rank_printed(text: str, error: str, chain: list[str]) -> None:
    found = read_traceback(f"loss 3.2\n{text}".splitlines())
    if found is None:
        assert not error
        return
    assert [_whole(one) for one in (found, *found.chain)] == [error, *chain]
    assert str(found.user_frame) == ("None" if error.startswith("c10.") else "/job/train.py:88 in step")


def test_the_error_of_another_process_is_found_in_a_text_that_was_cut() -> None:
    frames = '  File "/job/data.py", line 5, in get\n' * 99
    text = f"Caught OSError in process 3.\nOriginal Traceback (most recent call last):\n{frames}{STALE}"
    cut = f"{text[:END_CHARS]}\n[... 9 characters ...]\n{text[-END_CHARS:]}"
    found = with_chain(RankError(type="RuntimeError", message=cut), RankError(type="KeyError", message="3"))
    assert [_whole(one) for one in found.chain] == [STALE, "KeyError: 3"]
    assert str(found.chain[0].user_frame) == "/job/data.py:5 in get"


def _whole(error: RankError) -> str:
    return f"{error.type}: {error.message}" if error.message else error.type
