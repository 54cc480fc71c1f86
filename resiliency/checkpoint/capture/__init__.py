# SPDX-License-Identifier: Apache-2.0
"""Memory that the host owns: slots, arena, and the copy of a step's state into them."""
