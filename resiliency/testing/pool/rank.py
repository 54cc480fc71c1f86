# SPDX-License-Identifier: Apache-2.0
"""What runs inside a rank process of the pool: one job after another.

A rank that has answered is clean again: it left the process group, and environment, working
directory and signal handlers are as before the job.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import pickle
import random
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from resiliency.runtime import RunInfo, awake_s
from resiliency.testing.faults import FaultInjector
from resiliency.testing.pool.job import READY, Job, Reply, active
from resiliency.testing.pool.stacks import offer_stacks

_PR_SET_PDEATHSIG = 1


def serve(connection: Connection) -> None:
    """Run jobs until the parent closes its end."""
    # A rank must not outlive the pool, whatever happened to the parent's cleanup.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    faulthandler.enable()
    offer_stacks()
    # A loader's worker that collected what earlier jobs left would take apart groups of torch, whose threads
    # are not in it: it hung, or ended by SIGSEGV.
    os.register_at_fork(after_in_child=gc.freeze)
    torch.set_num_threads(1)
    while True:
        try:
            job: Job = connection.recv()
        except EOFError:
            return
        reply = _run(job, connection)
        connection.send(reply)
        if not reply.reusable:
            return


def _run(job: Job, connection: Connection) -> Reply:
    awake_s()  # its thread is of the process, not of the job
    threads = set(threading.enumerate())
    value, error, joined = b"", "", False
    try:
        with _scene(job):
            fn, args = pickle.loads(job.call)  # noqa: S301  # sent by our own parent
            connection.send(READY)
            connection.recv()  # GO, or the end of the pipe
            with _process_group(job), active(FaultInjector(job.faults, RunInfo.from_env())):
                joined = True
                value = pickle.dumps(fn(job.rank, *args))
    except (Exception, SystemExit):  # process border: the parent reports it
        error = traceback.format_exc()
    leaked = [thread.name for thread in threading.enumerate() if thread not in threads]
    if leaked and not error:
        error = f"rank {job.rank} returned but left threads behind: {', '.join(leaked)}"
    if error:
        # After a failed join torch numbers groups differently here than in the other ranks, and the
        # next job would wait for itself.
        return Reply(error=error, reusable=joined and not leaked)
    return Reply(value=value)


@contextmanager
def _process_group(job: Job) -> Iterator[None]:
    if job.store_path is None:
        yield
        return
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(job.store_path, job.world_size),  # type: ignore[attr-defined]
        rank=job.rank,
        world_size=job.world_size,
        timeout=timedelta(seconds=job.start_timeout_s),
    )
    try:
        # Gloo returns in each rank as soon as its own connections stand.  A rank whose function
        # ends at once would close them while a slower one still joins, and fail that one.
        dist.barrier()
        # Joining may be slow on a busy machine; a collective among living ranks may not.  There is
        # no public way to give the two different limits.
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=job.operation_timeout_s))
        yield
    finally:
        if dist.is_initialized():  # the job may have left the group itself
            dist.destroy_process_group()


@contextmanager
def _scene(job: Job) -> Iterator[None]:
    """Identity as torchrun would set it, fixed random state; afterwards everything as before."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
    handlers = {number: signal.getsignal(number) for number in numbers}
    env, cwd = dict(os.environ), os.getcwd()
    sys.path[:] = job.sys_path
    os.environ.update(
        RANK=str(job.rank),
        LOCAL_RANK=str(job.rank),
        WORLD_SIZE=str(job.world_size),
        LOCAL_WORLD_SIZE=str(job.world_size),
        **job.env,
    )
    random.seed(0)
    torch.manual_seed(0)
    try:
        yield
    finally:
        for name in set(os.environ) - set(env):
            del os.environ[name]
        os.environ.update(env)
        os.chdir(cwd)
        for number, handler in handlers.items():
            signal.signal(number, handler)
