# SPDX-License-Identifier: Apache-2.0
"""Watchdogs of a host: what its kernel log, its GPUs and its network ports say about its hardware.

    kernel log, NVML, sysfs --> watchdog (a process of its own) --findings--> host daemon --report--> sensor

A watchdog only looks.  One that fails, hangs, crashes or is missing makes its answer *unknown*, which is
logged once and ends nothing: neither the daemon nor a job.
"""
