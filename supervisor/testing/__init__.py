# SPDX-License-Identifier: Apache-2.0
"""What tests of the supervisor, and of policies of one's own, run against: twins of what it drives."""
