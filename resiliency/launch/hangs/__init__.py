# SPDX-License-Identifier: Apache-2.0
"""Finding out that the ranks of this host stand still, and why."""
