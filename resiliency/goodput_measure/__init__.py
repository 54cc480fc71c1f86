# SPDX-License-Identifier: Apache-2.0
"""Goodput: how much of the time that a job held its machines became training that lasted.

    tracker     writes events: the published six for the calculator, all of them for the ledger
    reader      streams events back from files of any size, or from Google Cloud Logging
    splitter    cuts the bytes of logs and of exports into JSON texts
    published   the published goodput formula, a pure function
    ledger      every microsecond of every rank has one cause; a pure function of the full event log
    marks       what a rank's events leave behind, in columns
    lives       what each process of a rank said, in order
    lanes       the causes that cover a rank's time, and how overlaps are settled
    incidents   what each fault cost, span by span
    tracks      the lane of each rank while events come, with its sums
    windows     the causes of a part of the time: rolling goodput, attempts
    reliability outages: MTTF, MTTR, distributions
    what_if     what another interval between saves would have cost
    jobs        all of that for one job, and for several together
    report      the same as text
    prometheus  the same as metrics
    follow      the same while the logs are written, at the price of what is new
    figures     what a line and the metrics show of a job that runs
    zoom        the ledger in several resolutions, for the page
    timeline    the ledger as values to draw; its `png` and `html` draw them, its `file` writes them
    cloud       the border to Google Cloud Logging
    calculator  the command line over all of these

Nothing here imports torch.
"""
