# SPDX-License-Identifier: Apache-2.0
"""Keep large PyTorch training jobs alive.

One idea runs through the package: a training step's state is captured once into memory that the
host owns, and everything else (disk, peers, restart) reads from there.  Importing this package
opens nothing, logs nothing, reads no environment variable and does not import torch; import the
part you need (`resiliency.launch`, `resiliency.goodput_measure`, `resiliency.callbacks`, ...).
"""

__version__ = "0.1.0"
