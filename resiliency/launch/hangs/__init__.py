# SPDX-License-Identifier: Apache-2.0
"""Finding out that ranks stand still or are slow, and why."""
