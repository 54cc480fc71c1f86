# SPDX-License-Identifier: Apache-2.0
"""Room for open files: what a process may have, and more of it for one connection per rank or host.

The usual soft limit is 1024, as `select` can serve no more; the hard one is far above.  The soft one is
raised by what is needed, so that the rest of the program keeps the room that it had.
"""

from __future__ import annotations

import os
import resource

from resiliency.errors import ConfigError

#: For what the process opens meanwhile.
_SPARE = 64


def make_room_for(count: int, *, what: str) -> None:
    """Let this process open `count` more files than now.

    Raises:
        ConfigError: the hard limit is below that.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        is_open = len(os.listdir("/proc/self/fd"))
    except OSError:  # not one is left: what is opened next says so
        return
    needed = is_open + count + _SPARE
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise ConfigError(
            f"{what} need {count} descriptors; {is_open} files are open, and the limit is {hard}.",
            hint="Raise the hard limit of open files (ulimit -Hn, LimitNOFILE of the service or container).",
        )
    wanted = soft + count
    wanted = max(needed, wanted if hard == resource.RLIM_INFINITY else min(wanted, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
