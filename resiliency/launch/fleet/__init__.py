# SPDX-License-Identifier: Apache-2.0
"""The launcher's side of the supervisor: what it reports, and what it is told to do."""
