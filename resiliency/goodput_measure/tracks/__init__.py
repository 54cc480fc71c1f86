# SPDX-License-Identifier: Apache-2.0
"""What is known of each rank while events still come, with sums that grow with it."""
