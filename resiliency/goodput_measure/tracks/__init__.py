# SPDX-License-Identifier: Apache-2.0
"""What is known of each rank while events still come, and sums over all ranks that grow with it."""
