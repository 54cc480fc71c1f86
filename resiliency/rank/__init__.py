# SPDX-License-Identifier: Apache-2.0
"""What a rank shows and leaves to its launcher, beyond its steps."""
