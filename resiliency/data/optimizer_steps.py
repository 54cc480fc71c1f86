# SPDX-License-Identifier: Apache-2.0
"""Listeners to the steps that an optimizer makes.

An optimizer gets one hook of torch's, which stays and calls the listeners of the moment. A hook for each of
them would have to be removed within a step, where torch walks the dict of its hooks: that step would fail
with the parameters updated and the later hooks not called.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

Listener = Callable[[], None]

_LISTENERS: WeakKeyDictionary[Optimizer, list[Listener]] = WeakKeyDictionary()


class StepListener:
    """Calls `called` after each step that an optimizer makes, until `remove`."""

    def __init__(self, optimizer: Optimizer, called: Listener) -> None:
        if optimizer not in _LISTENERS:
            _LISTENERS[optimizer] = []
            optimizer.register_step_post_hook(partial(_call, _LISTENERS[optimizer]))
        self._among, self._called = _LISTENERS[optimizer], called
        self._among.append(called)

    def remove(self) -> None:
        """May be called within a step, and again."""
        if self._called in self._among:
            self._among.remove(self._called)


def _call(listeners: list[Listener], optimizer: Optimizer, *_: object) -> None:
    # Fused optimizers are called for a step that a gradient scaler skips, too, and are told so by this.
    if getattr(optimizer, "found_inf", None):
        return
    for called in tuple(listeners):
        called()
