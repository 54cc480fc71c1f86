# SPDX-License-Identifier: Apache-2.0
"""The host daemon: what one training host knows of its workers, and what it is asked to do.

It outlives the launcher, and the launcher outlives it.  It decides nothing: it relays what launchers and
programs report, says how old that is, and hands each command to the launcher once.
"""
