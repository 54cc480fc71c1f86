# SPDX-License-Identifier: Apache-2.0
"""Goodput: how much of the time that a job held its machines became training that lasted.

    tracker     writes events: the published six for the calculator, all of them for the ledger
    reader      streams events back from files of any size, or from Google Cloud Logging
    published   the published goodput formula, a pure function
    ledger      every microsecond of every rank has one cause; a pure function of the full event log
    lives       what each process of a rank said, in order
    lanes       the causes that cover a rank's time, and how overlaps are settled
    incidents   what each fault cost, span by span
    timeline    the ledger as a picture
    report      the same as text
    cloud       the border to Google Cloud Logging
    calculator  the command line over all of these

Nothing here imports torch.
"""
