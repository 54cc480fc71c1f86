# SPDX-License-Identifier: Apache-2.0
"""What the cleaner's flags mean, and every check of them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from resiliency.errors import ConfigError
from resiliency.files import path_flag

#: 31 years: what is meant to be for ever.
_LONGEST_S = 1e9

_EPILOG = """\
what is never removed:
  the newest complete checkpoint; one that is being read (it has a lease), and the older ones that its
  reader would fall back to; one that was found bad (see --remove-quarantined) or that others wrote; a
  marker or file that changed within --unfinished-age; generations of this job's own local tier (see
  --prune-local); anything below a prefix that has no checkpoint/step=N; another job's folder
  while its cleaner runs, while it has processes on this host, while it reads or writes, or within
  --other-jobs-idle after its last change.

exit codes:
  0 ended by SIGTERM, or --once is done; 1 --once could not do all; 2 wrong usage; 130 Ctrl-C

example, beside a job that was started with --job-name llama --persistent-ckpt-dir /shared/ckpt:
  python3 benchmark/ckpt_cleaner.py --job-identifier llama --persistent-ckpt-dir-prefix /shared/ckpt
"""


@dataclass(frozen=True, kw_only=True)
class CleaningPlan:
    """A checked command line."""

    job: str
    local: Path | None
    persistent: Path | None
    keep: int
    interval: timedelta
    unfinished_age: timedelta
    local_idle: timedelta
    persistent_idle: timedelta
    prune_local: bool
    quarantined: bool
    dry_run: bool
    once: bool


def parse(argv: Sequence[str] | None = None) -> CleaningPlan:
    """Read and check the flags.

    Raises:
        ConfigError: a combination that cannot work; the message names the flag.
        SystemExit: ``--help``, or a flag that argparse refuses.
    """
    args = _parser().parse_args(argv)
    local, persistent = args.local_ckpt_dir_prefix, args.persistent_ckpt_dir_prefix
    if local is None and persistent is None:
        raise ConfigError("there is nothing to clean.", hint="Give --persistent-ckpt-dir-prefix, or both.")
    if local is not None and persistent is not None and local.resolve() == persistent.resolve():
        raise ConfigError(f"{local} cannot be both tiers: what one host sees is not what all hosts see.")
    job = args.job_identifier
    if not job or "/" in job or job in (".", ".."):
        raise ConfigError(f"--job-identifier {job!r} cannot name a folder.", flag="--job-identifier")
    if args.num_checkpoints_to_keep < 1:
        raise ConfigError(
            f"--num-checkpoints-to-keep {args.num_checkpoints_to_keep} would delete the last checkpoint.",
            hint="Give at least 2: then one that turns out damaged has another behind it.",
            flag="--num-checkpoints-to-keep",
        )
    for name in ("sleep_interval", "unfinished_age", "other_jobs_idle"):
        value = getattr(args, name)
        if value is not None and not 0 <= value <= _LONGEST_S:
            raise ConfigError(f"--{name.replace('_', '-')} must be 0 to {_LONGEST_S:g}, found {value}.")
    if not args.sleep_interval:
        raise ConfigError("--sleep-interval must not be 0: the cleaner would never pause.")
    idle = args.other_jobs_idle
    return CleaningPlan(
        job=job,
        local=local,
        persistent=persistent,
        keep=args.num_checkpoints_to_keep,
        interval=timedelta(seconds=args.sleep_interval),
        unfinished_age=timedelta(seconds=args.unfinished_age),
        local_idle=timedelta(seconds=0 if idle is None else idle),
        persistent_idle=timedelta(seconds=3600 if idle is None else idle),
        prune_local=args.prune_local,
        quarantined=args.remove_quarantined,
        dry_run=args.dry_run,
        once=args.once,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Remove folders of other jobs, unfinished checkpoints and old complete ones, while the\n"
        "job trains.  One process per host.  A job's checkpoints are PREFIX/<job>/checkpoint/step=N.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    where = parser.add_argument_group("where")
    where.add_argument(
        "--local-ckpt-dir-prefix",
        type=path_flag,
        metavar="DIR",
        help="memory or disk of this host: what the job was given as --local-ckpt-dir",
    )
    where.add_argument(
        "--persistent-ckpt-dir-prefix",
        type=path_flag,
        metavar="DIR",
        help="storage that all hosts see: what the job was given as --persistent-ckpt-dir; only the cleaner "
        "of the first host (NODE_RANK 0 or unset) works on it",
    )
    where.add_argument("--job-identifier", required=True, metavar="NAME", help="the job that this is for")
    what = parser.add_argument_group("what")
    what.add_argument(
        "--num-checkpoints-to-keep",
        type=int,
        default=3,
        metavar="K",
        help="newest complete checkpoints that stay (default: %(default)s).  Let only one of cleaner and job "
        "delete: give a job that saves in NeMo's own form --topk-ckpt -1",
    )
    what.add_argument(
        "--prune-local",
        action="store_true",
        help="also delete old generations of this job's local tier, replicas included.  The agents do that, "
        "and they know what this host cannot: whether a newer one is complete on all hosts.  For a tier "
        "that no agent looks after",
    )
    what.add_argument(
        "--remove-quarantined",
        action="store_true",
        help="also delete checkpoints that were found bad; else they stay for people to look at",
    )
    _timing_flags(parser.add_argument_group("when"))
    return parser


def _timing_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--sleep-interval",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="pause between two passes (default: %(default)g)",
    )
    group.add_argument(
        "--unfinished-age",
        type=float,
        default=900.0,
        metavar="SECONDS",
        help="a checkpoint with a marker counts as being written until nothing of it has changed for so long "
        "(default: %(default)g); longer than a save waits for its slowest rank",
    )
    group.add_argument(
        "--other-jobs-idle",
        type=float,
        metavar="SECONDS",
        help="spare another job's folder until it has been unchanged for so long, for it may be alive and "
        "show no other sign (default: 3600 on persistent storage; 0 on the local tier, where the jobs of "
        "this host show)",
    )
    group.add_argument("--once", action="store_true", help="make one pass and exit")
    group.add_argument("--dry-run", action="store_true", help="say what would go, and remove nothing")
