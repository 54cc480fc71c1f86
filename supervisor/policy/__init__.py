# SPDX-License-Identifier: Apache-2.0
"""The rules of the supervisor, each a small pure function or value over numbers and names.

Nothing here knows of hosts on a network, of events or of commands, and nothing reads a clock: `now` is a
number of seconds that the caller passes in.  A launcher can use these rules as well as the controller does.
"""
