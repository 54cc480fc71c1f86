# SPDX-License-Identifier: Apache-2.0
"""The launcher: starts the workers of one host, notices when one dies or hangs, and restarts them.

It is NVRx's fault-tolerant agent with the same flags as torchrun, plus what a long job needs and
neither has: death is an event of the kernel and not found by a poll, every incident is recorded,
ranks stay on their hosts, and no process is left behind however the launcher ends.

    argv -> cli.parse -> options.resolve -> main.run -> agent.ResilientAgent (over _compat)
                         every refusal             events, exit code      workers, rank monitors
                         happens here

Nothing before `_compat` imports torch, so that ``--help`` and refusals come at once.
"""
