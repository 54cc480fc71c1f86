# SPDX-License-Identifier: Apache-2.0
"""The failure simulator: it injures a training job on purpose, by a schedule that every node computes alike.

*What* fails and *when* is a list of values (`faults`, `schedule`), drawn from a seed by our own generator
(`draws`), so that all nodes, runs and Python versions agree; *how* it fails is an injector (`injectors`).
Each is replaceable.

Invariants:

- A node acts on its own devices only, and on processes of the named job and of the same user only.
- What an effect needs to be undone is on disk before the effect (`journal`).  The end of the simulator undoes
  it; after a SIGKILL the next start does.
- The simulator ends when the job ends.

Importing this package opens nothing, logs nothing, reads no environment variable, and never imports torch.
"""
