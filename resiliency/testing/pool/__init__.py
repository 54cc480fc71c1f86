# SPDX-License-Identifier: Apache-2.0
"""The processes behind `resiliency.testing.rank_pool`."""
