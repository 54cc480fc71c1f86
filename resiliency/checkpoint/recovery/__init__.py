# SPDX-License-Identifier: Apache-2.0
"""After a restart: who still holds what, what to take from where, and which copies to make anew.

`locations`, `planner`, `repairs` and `refusals` are pure: the same lists give the same plan on every rank,
which is why ranks exchange what they hold once and then agree without another word.
"""
