# SPDX-License-Identifier: Apache-2.0
"""How the parts of the supervisor reach each other: gRPC on asyncio, with identity, limits and deadlines.

Every connection is checked at the door: who it is (`security`), what it may do (`Role`), how much and how
often it speaks (`limits`), and which protocol (`host_streams`).  Every call has a deadline, and every
failure is one of two errors: `Refused`, the other side understood and said no, or `Unreachable`, it may
never have heard.
"""
