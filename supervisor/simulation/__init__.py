# SPDX-License-Identifier: Apache-2.0
"""The real sensor, controller, actuator and event log in a virtual fleet, with faults from a seed.

`loop` is virtual time; `fleet` are hosts that train, their daemons and the orchestrator; `plane` runs the
real logic and can be stopped at any message and between any two writes; `faults` draws what goes wrong;
`invariants` says what must never be; `run` is one history from a seed, and makes a failing one small.
"""
