# SPDX-License-Identifier: Apache-2.0
"""What an Xid of NVIDIA's driver asks for: an application's error never takes a host away.

The driver's own recovery action (NVML, or the text of Xid 154) goes before the catalogue, because it has seen
the registers and the catalogue has seen only the number.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum


class Remedy(Enum):
    """From harmless to grave; `worst` relies on this order."""

    LOG = "log"
    #: Not in the catalogue, or to be told only from its status word: counted, never a reason alone.
    UNKNOWN = "unknown"
    #: For a person, with nothing that a machine could do.
    SUPPORT = "support"
    RESTART_APP = "restart_app"
    #: The GPU is reset once its users are gone; the host stays.
    RESET_GPU = "reset_gpu"
    #: The host is drained, its GPU reset, and the next Xids decide (48, double-bit ECC).
    DRAIN_AND_RESET = "drain_and_reset"
    OUT_OF_SERVICE = "out_of_service"

    @property
    def needs_host(self) -> bool:
        """True where the job cannot go on with this host as it is."""
        return self in (Remedy.RESET_GPU, Remedy.DRAIN_AND_RESET, Remedy.OUT_OF_SERVICE)

    @property
    def cordons(self) -> bool:
        """True where no job may be put on the host until it was seen to."""
        return self in (Remedy.DRAIN_AND_RESET, Remedy.OUT_OF_SERVICE)


def _codes(*parts: int | range) -> frozenset[int]:
    return frozenset(code for part in parts for code in (part if isinstance(part, range) else (part,)))


# A code that is in two groups belongs to the graver one, which is looked at first.
_CATALOGUE = (
    (Remedy.OUT_OF_SERVICE, _codes(54, 74, 79, 151)),
    (Remedy.DRAIN_AND_RESET, _codes(48)),
    (Remedy.RESET_GPU, _codes(46, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158)),
    (
        Remedy.RESTART_APP,
        _codes(
            *(8, 11, 13, 25, 31, 32, range(39, 42), 60, range(68, 73), range(75, 78), 80, range(82, 87)),
            *(88, 89, 94, range(96, 106), range(126, 136), 139),
        ),
    ),
    (Remedy.SUPPORT, _codes(142)),
    (Remedy.LOG, _codes(37, 38, 43, 44, 63, 66, 67, 92, 93, 106, 107, 121, 141, 152, 153, 157, 160, 161)),
)

#: The driver's own words (NVML's recovery actions), in lower case.
ADVICE = {
    "none": Remedy.LOG,
    "gpu_reset": Remedy.RESET_GPU,
    "drain_p2p": Remedy.DRAIN_AND_RESET,
    "drain_and_reset": Remedy.DRAIN_AND_RESET,
    "node_reboot": Remedy.OUT_OF_SERVICE,
    "bus_reset": Remedy.RESET_GPU,
    "system_reboot": Remedy.OUT_OF_SERVICE,
}


def remedy(code: int, advice: str = "") -> Remedy:
    """What to do about Xid `code`; an `advice` that is not one of `ADVICE` is taken for none given."""
    known = ADVICE.get(advice.lower())
    if known is not None:
        return known
    return next((found for found, codes in _CATALOGUE if code in codes), Remedy.UNKNOWN)


def worst(found: Iterable[tuple[int, str]]) -> Remedy:
    """The gravest remedy of several (code, advice): an application's 31 does not hide another GPU's 79."""
    order = list(Remedy)
    return max((remedy(code, advice) for code, advice in found), key=order.index, default=Remedy.LOG)
