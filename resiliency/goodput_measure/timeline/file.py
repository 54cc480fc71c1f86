# SPDX-License-Identifier: Apache-2.0
"""Writes the timeline of a ledger to a file: a picture, or a page to zoom in."""

from __future__ import annotations

import os
from pathlib import Path

from resiliency.errors import ConfigError
from resiliency.goodput_measure.ledger import Ledger
from resiliency.goodput_measure.timeline.html import render_html
from resiliency.goodput_measure.timeline.rows import arrange

SUFFIXES = (".png", ".html")


def write_timeline(ledger: Ledger, path: str | os.PathLike[str]) -> None:
    """Draw `ledger` to `path`; its suffix chooses PNG or self-contained HTML.

    Raises:
        ConfigError: another suffix, no rank in the ledger, or the file cannot be written.
    """
    target = Path(path)
    timeline = arrange(ledger)
    if target.suffix.lower() == ".png":
        from resiliency.goodput_measure.timeline.png import render_png  # loads matplotlib

        content = render_png(timeline)
    elif target.suffix.lower() == ".html":
        content = render_html(timeline, ledger).encode()
    else:
        raise ConfigError(
            f"a timeline ends in {' or '.join(SUFFIXES)}, found {target.name!r}.", path=str(target)
        )
    try:
        target.write_bytes(content)
    except OSError as error:
        raise ConfigError(
            f"cannot write the timeline {str(target)!r}: {error.strerror}.", path=str(target)
        ) from error
