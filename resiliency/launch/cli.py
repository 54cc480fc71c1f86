# SPDX-License-Identifier: Apache-2.0
"""The command line: every flag of torchrun and ft_launcher, and those that only this launcher has.

Flags are declared here and not taken from the parsers of torch and NVRx, because importing those
costs seconds before the first line of help; tests compare this table with both parsers, so a flag
that either gains or changes is noticed.

Spelling is free: dashes and underscores mean the same anywhere in a flag.  Each flag also reads
``PET_<NAME>`` from the environment, as torchrun's do; the command line wins.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from resiliency.errors import ConfigError

#: The default of --rdzv-id, torchrun's own.
UNNAMED = "none"
USAGE = "launcher.py [LAUNCHER_FLAGS] SCRIPT [WORKLOAD_FLAGS]"
DESCRIPTION = """\
Start the workers of this host, and start them again in place when one dies or hangs.

Everything before SCRIPT is for the launcher, everything after it for the script.  Run the same
command on every host of the job."""
EPILOG = """\
examples:
  one host, 8 workers, up to 3 restarts, logs kept in files and shown:
    launcher.py --nproc-per-node 8 --max-restarts 3 --log-dir logs --tee 3 train.py --lr 1e-4

  two hosts that meet at port 29400 of the first; run on both:
    launcher.py --nnodes 2 --nproc-per-node 8 --rdzv-endpoint host1:29400 --rdzv-id job7 train.py

  restart a rank that sends no heartbeat for a minute (the script uses NVRx's RankMonitorClient):
    launcher.py --nproc-per-node 8 --max-restarts 3 --ft-rank-heartbeat-timeout 60 train.py

exit codes: 0 all workers succeeded; 1 workers failed; 70 the job's own errors would end it again: do
not requeue; 2 refused before anything started; 3 the check found this host faulty, 4 slow
(--exclude-straggler); 128+N ended by signal N.

Each flag also reads PET_<NAME>, for instance PET_MAX_RESTARTS=3."""


def _boolean(text: str) -> bool:
    return text.lower() in ("true", "1", "yes")


def _names(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One flag.  `legacy` spellings work and are not shown; `switch` flags take no value."""

    name: str
    help: str
    short: str = ""
    legacy: tuple[str, ...] = ()
    dest: str = ""
    type: Callable[[str], object] = str
    default: object = None
    metavar: str = ""
    choices: tuple[str, ...] = ()
    switch: bool = False

    @property
    def destination(self) -> str:
        return self.dest or self.name.removeprefix("--").replace("-", "_")

    @property
    def spellings(self) -> tuple[str, ...]:
        return (*((self.short,) if self.short else ()), self.name, *self.legacy)


def _ft(name: str, help: str, *legacy: str, type: Callable[[str], object] = float, **rest: object) -> Flag:
    """A field of NVRx's fault tolerance configuration, with its older spelling."""
    dashed = name.replace("_", "-")
    return Flag(
        name=f"--ft-{dashed}",
        legacy=(f"--ft-param-{dashed}", *legacy),
        type=type,
        metavar="SECONDS" if type is float else "",
        help=help,
        **rest,  # type: ignore[arg-type]
    )


RENDEZVOUS = (
    Flag(
        name="--nnodes",
        default="1:1",
        metavar="N|MIN:MAX",
        help="Hosts in the job.  A range lets the job go on with fewer hosts and take in new ones.",
    ),
    Flag(
        name="--node-rank",
        type=int,
        metavar="RANK",
        help="Fixed place of this host, from 0.  When every host is given one, ranks follow it; otherwise "
        "hosts are ordered at the first rendezvous and keep their order through restarts.",
    ),
    Flag(
        name="--rdzv-endpoint",
        default="",
        metavar="HOST[:PORT]",
        help="Where the hosts meet (port 29400 by default).  HOST serves it while the job runs, unless "
        "python3 -m resiliency.launch.rendezvous_store does.  Not needed for one host.",
    ),
    Flag(
        name="--rdzv-id",
        default=UNNAMED,
        metavar="ID",
        help="Name of the rendezvous; the same on all hosts, different for each job.",
    ),
    Flag(
        name="--rdzv-backend",
        default="",
        metavar="c10d|static",
        help="c10d (default).  static is accepted: the hosts then meet at --master-addr:--master-port.",
    ),
    Flag(
        name="--rdzv-conf",
        default="",
        metavar="KEY=VALUE,...",
        help="Times in seconds: join_timeout (900) to wait for all hosts, last_call_timeout (30) for more "
        "than the minimum, read_timeout (600), close_timeout (600); a host is taken for dead after "
        "keep_alive_max_attempt (3) missed signs of life, one each keep_alive_interval (5).",
    ),
    Flag(
        name="--standalone",
        switch=True,
        help="One host, meeting at a free local port.  The default with one host.",
    ),
    Flag(name="--master-addr", metavar="HOST", help="Address of host 0, torchrun's static style."),
    Flag(name="--master-port", type=int, metavar="PORT", help="Port at --master-addr (29500)."),
    Flag(
        name="--local-addr",
        metavar="ADDRESS",
        help="Address by which other hosts reach this one; default: that of the interface towards the "
        "rendezvous store, or where that is on this host alone, its full name.",
    ),
)

WORKERS = (
    Flag(
        name="--nproc-per-node",
        default="1",
        metavar="N|gpu|cpu|auto",
        help="Workers on this host: a number, one per GPU, one per CPU core, or auto (GPUs if any, else "
        "cores).",
    ),
    Flag(
        name="--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="Times that the job's workers are started again after a failure before the job fails.  "
        "0 (default, as torchrun): the first failure ends the job.  Counted for the whole job, not per host.",
    ),
    Flag(
        name="--monitor-interval",
        type=float,
        default=0.1,
        metavar="SECONDS",
        help="Longest time between two looks at the other hosts.  The death of a worker of this host wakes "
        "the launcher at once.",
    ),
    Flag(
        name="--term-timeout",
        type=float,
        default=1800.0,
        metavar="SECONDS",
        help="Time that workers get to finish after a signal to the launcher is passed on, before SIGKILL.",
    ),
    Flag(
        name="--workers-stop-timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="Time that workers get between SIGTERM and SIGKILL when they are stopped for a restart, and "
        "when the launcher itself was killed.",
    ),
    Flag(
        name="--shutdown-timeout",
        type=float,
        metavar="SECONDS",
        help="Sets both timeouts above, as torchrun's flag of this name does.",
    ),
    Flag(
        name="--signals-to-handle",
        default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        metavar="NAMES",
        help="Signals that are passed on to the workers and end the job.",
    ),
    Flag(
        name="--start-method",
        default="spawn",
        choices=("spawn", "fork", "forkserver"),
        metavar="METHOD",
        help="How --run-path starts workers: spawn, fork or forkserver.",
    ),
    Flag(
        name="--standby",
        default="auto",
        choices=("auto", "off"),
        metavar="auto|off",
        help="auto (default): when workers can be restarted, a process repeats the imports of the script in "
        "the background, and restarted workers are forked from it instead of importing again.  off: each "
        "worker imports for itself, as under torchrun.",
    ),
    Flag(
        name="--standby-preload",
        type=_names,
        metavar="MODULES",
        help="Import these, as torch,mylib.model, instead of what the script was seen to import.",
    ),
    Flag(name="--role", default="default", metavar="NAME", help="Name of the workers in logs."),
    Flag(name="--module", short="-m", switch=True, help="SCRIPT is a module, as in python -m."),
    Flag(name="--no-python", switch=True, help="Run SCRIPT itself, without the Python interpreter."),
    Flag(name="--run-path", switch=True, help="Run SCRIPT within the worker's interpreter (runpy.run_path)."),
    Flag(
        name="--virtual-local-rank",
        switch=True,
        help="Each worker sees only its own GPU, as device 0 and LOCAL_RANK 0.",
    ),
    Flag(name="--numa-binding", metavar="MODE", help="Not supported: refused with the alternative."),
)

LOGGING = (
    Flag(
        name="--log-dir",
        metavar="DIR",
        help="Where worker output is kept: DIR/<id>_<random>/attempt_<n>/<local rank>/stderr.log.",
    ),
    Flag(
        name="--redirects",
        short="-r",
        default="0",
        metavar="0-3|RANK:0-3,...",
        help="Output that goes to files instead of the console: 1 stdout, 2 stderr, 3 both; per local rank "
        "as 0:3,1:2.",
    ),
    Flag(
        name="--tee",
        short="-t",
        default="0",
        metavar="0-3|RANK:0-3,...",
        help="Output that goes to files and to the console.",
    ),
    Flag(
        name="--local-ranks-filter",
        default="",
        metavar="RANKS",
        help="Local ranks whose output is shown on the console, as 0,1.",
    ),
    Flag(name="--logs-specs", metavar="NAME", help="Entry point (torchrun.logs_specs) that places logs."),
    Flag(name="--event-log-handler", default="null", metavar="NAME", help="Only null; see --run-dir."),
    Flag(
        name="--duplicate-stdout-filters",
        type=_names,
        metavar="TEXTS",
        help="Not supported: refused with the alternative.",
    ),
    Flag(
        name="--duplicate-stderr-filters",
        type=_names,
        metavar="TEXTS",
        help="Not supported: refused with the alternative.",
    ),
)

FAULT_TOLERANCE = (
    Flag(
        name="--ft-cfg-path",
        legacy=("--fault-tol-cfg-path",),
        metavar="FILE",
        help="YAML file with a fault_tolerance section; flags below override it.",
    ),
    _ft(
        "initial_rank_heartbeat_timeout",
        "A rank that registered with its monitor must send its first heartbeat within this (3600).",
    ),
    _ft("rank_heartbeat_timeout", "Longest time between two heartbeats of a rank (2700)."),
    _ft(
        "rank_section_timeouts",
        "Longest time in a named section of the script, as setup:600,step:60; none: no limit.",
        type=str,
    ),
    _ft("rank_out_of_section_timeout", "Longest time outside any section (no limit)."),
    _ft("workload_check_interval", "How often the monitors compare heartbeats with the timeouts (5)."),
    Flag(
        name="--ft-safety-factor",
        legacy=("--ft-param-safety-factor",),
        type=float,
        metavar="FACTOR",
        help="Timeouts learnt at run time are the longest gap seen times this (5).",
    ),
    _ft("rank_termination_signal", "Signal that ends a hung rank (SIGKILL).", type=str),
    _ft("node_health_check_interval", "How often the monitors check the health of the GPUs (5)."),
    _ft("restart_check_interval", "For NVRx's layered restart protocol (60).", type=float),
    _ft("log_level", "Log level of the rank monitors (ERROR: what they find is reported here).", type=str),
    Flag(
        name="--ft-restart-policy",
        legacy=("--restart-policy",),
        default="any-failed",
        choices=("any-failed", "min-healthy"),
        metavar="POLICY",
        help="any-failed (default): one failed worker restarts all.  min-healthy: restart only when fewer "
        "than the minimum of --nnodes are healthy.",
    ),
    _ft(
        "enable_nic_monitor",
        "true: watch InfiniBand links, too.  Off unless asked for, because it needs such adapters.",
        type=_boolean,
    ),
    _ft("pci_topo_file", "File that describes which GPU is near which adapter.", type=str),
    _ft("link_down_path_template", "Path, with {dev_name}, that tells whether a link is down.", type=str),
    Flag(
        name="--ignore-missing-fault-tol-cfg",
        dest="ft_ignore_missing_cfg",
        switch=True,
        help="Accepted for old command lines; defaults always apply.",
    ),
)

HEALTH = (
    Flag(
        name="--hang-timeout-s",
        default="auto",
        metavar="auto|off|SECONDS",
        help="How long a job may stand still before its launcher ends the ranks that are to blame, which "
        "counts as their failure.  auto (default): 3 minutes or 8 usual steps where that is certain, and "
        "never otherwise: not for a wait on sockets, pipes or children, nor in a job of one rank or where "
        "all ranks stand in their loaders.  A number also ends these, and counts from the first finished "
        "step on: imports, restore and compilation before it have 30 minutes, or SECONDS if that is longer.  "
        "A rank in a debugger is never ended.  Within seconds, the log names ranks that stand still, and "
        "what they do, whatever this says.",
    ),
    Flag(
        name="--attempts-without-progress",
        type=int,
        default=3,
        metavar="N",
        help="End the job when N attempts or more (3; 0: never for that reason) failed by errors of its own "
        "and brought no new step, also where --max-restarts leaves more.  See --no-progress-s.",
    ),
    Flag(
        name="--no-progress-s",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="And only when these attempts ran so long in all (600), and longer than each attempt before.",
    ),
    Flag(
        name="--failure-policy",
        metavar="MODULE:FUNCTION",
        help="Called after a failure with the Evidence and the Diagnosis; returns an Advice, or None for the "
        "launcher's own.  It has 10 s; one that fails changes nothing.",
    ),
    Flag(
        name="--on-nan",
        default="ignore",
        choices=("stop", "rollback", "ignore"),
        metavar="stop|rollback|ignore",
        help="stop: a loss that is not finite ends the job, where a callback of ours or check_loss sees it.  "
        "rollback: it restarts the job from a checkpoint older than the newest.  ignore (default): training "
        "goes on.",
    ),
    Flag(
        name="--precheck",
        default="0",
        choices=("0", "1", "2"),
        metavar="{0,1,2}",
        help="Check this host before it joins the job: 0 no (default), 1 its cores, GPUs, memory and disk, "
        "compared with the other hosts, 2 also the links between hosts.  A faulty host leaves with exit "
        "code 3.  Give all hosts the same.",
    ),
    Flag(
        name="--exclude-straggler",
        switch=True,
        help="A host that the check finds slow leaves, too, with exit code 4; else that is logged.",
    ),
    Flag(
        name="--check-timeout-s",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="Longest time for the probes of a host, and again for the comparison with others (60).",
    ),
    Flag(
        name="--check-on",
        default="start",
        choices=("start", "host-change", "always"),
        metavar="WHEN",
        help="start (default): once, when this launcher starts.  host-change: also all hosts after another "
        "host came.  always: also before each restart of workers.",
    ),
)

SUPERVISOR = (
    Flag(name="--use-supervisor", switch=True, help="Report workers to the host daemon of the supervisor."),
    Flag(name="--host-daemon-port", type=int, default=61000, metavar="PORT", help="Its port (61000)."),
    Flag(
        name="--max-workload-restarts",
        type=int,
        default=0,
        metavar="N",
        help="Times that the supervisor may restart the whole workload (0).",
    ),
    Flag(
        name="--enable-workload-scaling",
        switch=True,
        help="Let the supervisor remove and add data-parallel replicas.",
    ),
    Flag(
        name="--num-nodes-per-dp",
        type=int,
        default=0,
        metavar="N",
        help="Hosts in one data-parallel replica; must divide --nnodes.",
    ),
    Flag(name="--num-dp-replicas", type=int, default=0, metavar="N", help="Replicas now (0: not set)."),
    Flag(name="--min-num-dp-replicas", type=int, default=0, metavar="N", help="Fewest (0: not set)."),
    Flag(name="--max-num-dp-replicas", type=int, default=0, metavar="N", help="Most (0: not set)."),
    Flag(
        name="--container-termination-threshold-s",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="Force-delete a container that does not end within this (0: the supervisor's own).",
    ),
    Flag(
        name="--workload-downtime-threshold-s",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="Act on a workload that is down for longer than this (0: the supervisor's own).",
    ),
    Flag(name="--workload-name", default="", metavar="NAME", help="Name at the orchestrator."),
    Flag(
        name="--job-name",
        default="",
        metavar="NAME",
        help="Name of the job in events and logs; default: JOB_IDENTIFIER, else --rdzv-id, else local.",
    ),
    Flag(name="--container-name", default="", metavar="NAME", help="Container that runs the workers."),
)

EVENTS = (
    Flag(
        name="--run-dir",
        metavar="DIR",
        help="Where the job's events go: DIR/<job>-events.jsonl; default: RESILIENCY_RUN_DIR, else the "
        "working directory.  Workers find it in RESILIENCY_RUN_DIR.",
    ),
)

#: Title and flags of each group, in the order of the help text.
GROUPS: tuple[tuple[str, tuple[Flag, ...]], ...] = (
    ("rendezvous", RENDEZVOUS),
    ("workers", WORKERS),
    ("logging", LOGGING),
    ("fault tolerance", FAULT_TOLERANCE),
    ("health", HEALTH),
    ("supervisor", SUPERVISOR),
    ("events", EVENTS),
)
FLAGS: tuple[Flag, ...] = tuple(flag for _, flags in GROUPS for flag in flags)


class RefusingParser(argparse.ArgumentParser):
    """Raises ConfigError instead of exiting, so that all refusals of the launcher's programs look alike."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}.", hint="See --help.")


def build_parser() -> argparse.ArgumentParser:
    """The parser of the launcher's own flags; SCRIPT and what follows are split off before it."""
    parser = RefusingParser(
        prog="launcher.py",
        usage=USAGE,
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for title, flags in GROUPS:
        group = parser.add_argument_group(title)
        for flag in flags:
            shown = [spelling for spelling in (flag.short, flag.name) if spelling]
            if flag.switch:
                group.add_argument(*shown, dest=flag.destination, action="store_true", help=flag.help)
            else:
                group.add_argument(
                    *shown,
                    dest=flag.destination,
                    type=flag.type,
                    default=flag.default,
                    choices=flag.choices or None,
                    metavar=flag.metavar or flag.destination.upper(),
                    help=flag.help.replace("%", "%%"),
                )
    return parser


def parse(argv: Sequence[str], env: Mapping[str, str] | None = None) -> argparse.Namespace:
    """Parse a command line; adds `training_script` and `training_script_args`.

    Raises:
        ConfigError: unknown flag, bad value, or no script.
        SystemExit: after ``--help``.
    """
    flags, script = _split(argv)
    parsed = build_parser().parse_args([*_from_environment(os.environ if env is None else env), *flags])
    if not script:
        raise ConfigError("no script to run.", hint=f"usage: {USAGE}")
    parsed.training_script, parsed.training_script_args = script[0], script[1:]
    return parsed


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate the launcher's flags, in their main spelling, from the script and its arguments."""
    flags: list[str] = []
    words = list(argv)
    while words:
        word = words[0]
        if not word.startswith("-") or word == "-":
            return flags, words
        words.pop(0)
        if word == "--":
            return flags, words
        name, equals, value = word.partition("=")
        flag = _find(name)
        if flag is None:
            flags.append(word)  # help, -r3, or unknown: argparse knows which
            continue
        flags.append(f"{flag.name}{equals}{value}")
        if not flag.switch and not equals and words:
            flags[-1] += f"={words.pop(0)}"
    return flags, []


def _find(name: str) -> Flag | None:
    if not name.startswith("--"):
        return next((flag for flag in FLAGS if flag.short == name), None)
    name = name.replace("_", "-")
    exact = [flag for flag in FLAGS if name in flag.spellings]
    begun = [flag for flag in FLAGS if any(spelling.startswith(name) for spelling in flag.spellings)]
    if not exact and len(begun) > 1:
        choices = ", ".join(flag.name for flag in begun)
        raise ConfigError(f"{name} is ambiguous: it could be {choices}.", hint="See --help.", flag=name)
    return next(iter(exact or begun), None)


def _from_environment(env: Mapping[str, str]) -> list[str]:
    words = []
    for flag in FLAGS:
        name = f"PET_{flag.destination.upper()}"
        value = env.get(name)
        if value is None:
            continue
        if not flag.switch:
            words.append(f"{flag.name}={value}")
        elif value not in ("0", "1"):
            raise ConfigError(f"{name} must be 0 or 1, found {value!r}.", variable=name)
        elif value == "1":
            words.append(flag.name)
    return words
