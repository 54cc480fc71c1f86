# SPDX-License-Identifier: Apache-2.0
"""What keeps the launchers of one job in touch: a store that may come back, connections between them."""
