# SPDX-License-Identifier: Apache-2.0
"""Which rank or host is to blame: why a job stands still, why it failed, which host is broken or slow.

    ranks at one moment    -> hangs.explain_hang      who holds up the others
    evidence of an attempt -> diagnosis.diagnose      cause, culprits, advice
    probes, links          -> scores.judge, Pairing   the health of each host

These rules are values and functions: no clock, no file, no socket.  So launcher and supervisor decide by
the same rules, and a decision can be repeated from its record.  Folders beside this one collect what they
decide on.
"""
