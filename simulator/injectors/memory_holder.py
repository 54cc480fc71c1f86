# SPDX-License-Identifier: Apache-2.0
"""The process behind memory pressure: it holds memory until its standard input ends, as its simulator does.

It looks at the limits of its container before each piece and ever after.  Where others take what it left, it
gives memory back and does not take it again.  To be the first that the kernel kills is not enough: Kubernetes
sets ``memory.oom.group`` (cgroup v2), by which the container dies with the holder, the simulator included.
"""

from __future__ import annotations

import os
import select
import sys

if __name__ == "__main__":
    # Run by its path; what is imported is beside the package.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from collections.abc import Iterator
from pathlib import Path

from resiliency.cgroups import available_bytes

#: What memory pressure leaves free at least.
SPARED_BYTES = 512 << 20
#: How much is taken at a time, and how often a holder looks that has all it wants.
PIECE_BYTES, _LOOK_S = 16 << 20, 0.02


def hold_memory(size_bytes: int) -> Iterator[int]:
    """Take `size_bytes` piece by piece; each value is how many bytes are held after a look."""
    held: list[bytes] = []
    wanted = size_bytes
    while True:
        room = available_bytes() - SPARED_BYTES
        piece = min(PIECE_BYTES, wanted)
        if room < 0:
            wanted = 0
            del held[: -(room // PIECE_BYTES)]
        elif 0 < piece <= room:
            held.append(b"x" * piece)  # written to, or it would not be held
            wanted -= piece
        yield sum(map(len, held))


def main() -> None:
    # Whatever else takes memory faster than this looks: the kernel kills the holder before any other.
    Path("/proc/self/oom_score_adj").write_text("1000")
    before = -1
    for held in hold_memory(int(sys.argv[1])):
        if select.select([sys.stdin], [], [], 0 if held != before else _LOOK_S)[0]:
            return
        before = held


if __name__ == "__main__":
    main()
