# SPDX-License-Identifier: Apache-2.0
"""A launcher's end of the connections between launchers; SIGUSR1: it drops those that it has accepted."""

from __future__ import annotations

import os
import signal

from resiliency.launch.rendezvous.launcher_links import LauncherLinks

links = LauncherLinks("127.0.0.1", print)
if os.fork() == 0:  # such as a rank monitor, which may outlive the launcher
    signal.pause()
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
print(f"place {links.place}", flush=True)
while True:
    signal.sigwait({signal.SIGUSR1})
    for connection in list(links._accepted.values()):  # the thread takes them out
        connection.shutdown(2)
    print("dropped", flush=True)
