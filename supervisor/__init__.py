# SPDX-License-Identifier: Apache-2.0
"""The fleet plane: it sees that a host of a job is lost, decides once, and has it swapped, or the job shrunk.

One idea runs through the package: **a decision is a pure function**, `(state, event, now) -> (state,
commands)`. Its inputs are logged before they are decided upon, its commands before they are carried out, so
the log alone gives the state back, and a simulation can show what happens at every crash between two writes.

The supervisor may be away at any moment without harm to a running job.  Importing this package opens nothing,
logs nothing, reads no environment variable, and never imports torch.
"""
