# SPDX-License-Identifier: Apache-2.0
"""The controller's logic: what happened and what is known go in, a new state and commands come out.

`state` holds all that a decision may depend on, as tables of values; `turn` is one decision while it is made.
`incidents` gathers reports and sees them end, `verdicts` is what was concluded, `membership` which hosts
there are, `commands` what is sent, what it costs and what comes of it.  `guards` says what may not be done
now; `controller` asks the policy, and is the class that users extend.
"""
