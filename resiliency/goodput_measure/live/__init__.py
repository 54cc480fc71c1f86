# SPDX-License-Identifier: Apache-2.0
"""Goodput of jobs that still run: their files read as they grow, and metrics for Prometheus."""
