# SPDX-License-Identifier: Apache-2.0
"""Which host is broken or slow, decided before it costs a run.

    probes -> measurements -> scores.judge  \\
                                             HostHealth of each host, with its evidence
    links  -> pass or fail -> Pairing       /

`scores` and `pairing` are values and functions of the standard library alone: no clock, no file, no socket.
So the launcher and the supervisor decide by the same rules, and a decision can be repeated from its record.
"""
