# SPDX-License-Identifier: Apache-2.0
"""The daemon's side of its watchdogs: starts a process for each, and starts it again when it is of no use.

unknown --look--> known          a look that fails, hangs or crashes --> unknown, one warning
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resiliency.files import write_durably
from supervisor.plain import InvalidValue
from supervisor.values import Finding
from supervisor.watchdogs.process import WatchdogProcess

logger = logging.getLogger(__name__)

#: A look that takes longer hangs; the first one also loads libraries, on a busy machine.
LOOK_S, FIRST_LOOK_S = 20.0, 60.0
#: Between two processes of one watchdog.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0


@dataclass(frozen=True, kw_only=True)
class WatchdogSettings:
    """What to watch, and how often.

    Attributes:
        names: of `watchdog.NAMES`.
        interval_s: between two looks; the ring buffer of the kernel is read at once.
        cooldown_s: in which the same fact of one device is told once.
        kernel_log: ``/dev/kmsg`` or a file.
        gpus: a file that describes GPUs instead of NVML; empty: NVML.
        look_s: after which a look hangs.
    """

    names: Sequence[str] = ()
    interval_s: float = 10.0
    cooldown_s: float = 30.0
    kernel_log: str = "/dev/kmsg"
    gpus: str = ""
    look_s: float = LOOK_S


class WatchdogRunner:
    """Runs until it is cancelled.

    Args:
        host: whose findings they are.
        state_dir: keeps the memory of each watchdog.
        found: called with the findings of a look, before the memory that has them is kept.
    """

    def __init__(
        self,
        settings: WatchdogSettings,
        *,
        host: str,
        state_dir: Path,
        found: Callable[[Sequence[Finding]], None],
    ) -> None:
        self._settings, self._host, self._state_dir, self._found = settings, host, state_dir, found
        #: Why each watchdog's answer is unknown; empty where it is known.
        self.unknown: dict[str, str] = dict.fromkeys(settings.names, "not looked yet")
        self._warned: dict[str, str] = {}
        self._saved: dict[str, float] = {}  # when each memory was kept last

    async def run(self) -> None:
        await asyncio.gather(*(self._keep(name) for name in self._settings.names))

    async def _keep(self, name: str) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            looks = 0
            try:
                looks = await self._run_process(name)
            except OSError as error:
                self._judge(name, f"its process cannot be started: {error.strerror}")
            except Exception:
                # A fault of ours in what only looks must not end the daemon.
                logger.exception("watchdog %s: internal error", name)
                self._judge(name, "an internal error")
            pause_s = FIRST_PAUSE_S if looks else min(2 * pause_s, LONGEST_PAUSE_S)
            await asyncio.sleep(pause_s)

    async def _run_process(self, name: str) -> int:
        """One process from its start to its end; returns how often it looked."""
        settings, looks = self._settings, 0
        order = {
            "name": name,
            "host": self._host,
            "interval_s": settings.interval_s,
            "cooldown_s": settings.cooldown_s,
            "kernel_log": settings.kernel_log,
            "gpus": settings.gpus,
            "memory": self._load(name),
        }
        process = WatchdogProcess(order)
        try:
            while True:
                limit_s = settings.look_s + settings.interval_s if looks else FIRST_LOOK_S
                line = await process.read_line(limit_s)
                if not line:
                    break
                self._take(name, json.loads(line))
                looks += 1
            why = "its process ended"
        except TimeoutError:
            why = f"no answer within {limit_s:g} s"
        except (ValueError, KeyError, TypeError, InvalidValue) as error:
            why = f"its process said what cannot be understood: {error}"
        finally:
            code = process.kill()
        self._judge(name, why if code in (None, -signal.SIGKILL) else f"{why} with {code}")
        await process.wait_gone()  # a second one would hang in the same place
        return looks

    def _take(self, name: str, said: Mapping[str, Any]) -> None:
        findings = [Finding.from_dict(found) for found in said["findings"]]
        for note in said["notes"]:
            logger.warning("watchdog %s: %s", name, note)
        if findings:
            for found in findings:
                logger.warning("watchdog %s: %s", name, found.evidence.text)
            self._found(findings)
        # Without a finding nothing is lost by reading a few lines again: a chatty kernel costs no more syncs.
        now = time.monotonic()
        if said["memory"] and (
            findings or now - self._saved.get(name, -math.inf) >= self._settings.interval_s
        ):
            self._save(name, said["memory"])
            self._saved[name] = now
        self._judge(name, said["unknown"])

    def _judge(self, name: str, unknown: str) -> None:
        """Whether the answer is known now; one line for each change."""
        before, self.unknown[name] = self.unknown[name], unknown
        if unknown and unknown != before and self._warned.get(name) != unknown:
            self._warned[name] = unknown
            logger.warning("watchdog %s unknown: %s; nothing is concluded from that", name, unknown)
        elif before and not unknown:
            self._warned.pop(name, None)
            logger.info("watchdog %s: looks each %g s", name, self._settings.interval_s)

    def _path(self, name: str) -> Path:
        return self._state_dir / f"watchdog-{name}-{self._host}.json"

    def _load(self, name: str) -> Mapping[str, Any]:
        try:
            memory = json.loads(self._path(name).read_text())
            return memory if isinstance(memory, dict) else {}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            logger.warning("watchdog %s: its memory cannot be read: %s; it begins again", name, error)
            return {}

    def _save(self, name: str, memory: Mapping[str, Any]) -> None:
        path, data = self._path(name), json.dumps(memory).encode()
        try:
            if not path.exists() or path.read_bytes() != data:
                write_durably(path, data)
        except OSError as error:
            logger.error("memory of watchdog %s not kept: %s", name, error)
