# SPDX-License-Identifier: Apache-2.0
"""What the launcher does about a failed attempt: collect evidence, ask the rules, ask the user's policy."""
