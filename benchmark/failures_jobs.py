# SPDX-License-Identifier: Apache-2.0
"""The trainings of goodput_under_failures.py, their launchers and savers, and how far each came."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from failures_savers import LOCAL_SAVES
from restart_runs import OURS as OURS_LAUNCHER

from resiliency.events import EventType, events_path
from resiliency.goodput_measure.reader import read_events
from resiliency.runtime import RunInfo

ROOT = Path(__file__).resolve().parents[1]
OURS = "ours"
#: What ranks and launcher tell of themselves, in the directory of a run.
EVENTS = "launcher"


class Note(NamedTuple):
    """That rank 0 finished a step, or, with the first note of an attempt, with which step it begins.

    Attributes:
        began: when the step did; None: with the note before it.
    """

    time: float
    step: int
    began: float | None = None


Notes = Sequence[Note]


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """A launcher of `restart_runs`, and how its ranks save."""

    launcher: str
    save: str


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training script that every launcher can start.

    Attributes:
        fault_interval_s: mean time between failures, where nothing else is asked for; and `faults` so many.
        bar: share of the possible steps that ours is to keep; None: it is to go on every time.
        noted: causes of the ledger whose time is in the notes of rank 0.
        first_step: a line that it prints after its first steps, as a pattern.
        hosts: of one rank each, beside a spare, where hosts are lost; 1: ranks of one host are injured.
        left_out: contestants that could not be made to take part, with the reason.
    """

    name: str
    description: str
    contestants: Mapping[str, Contestant]
    fault_interval_s: float
    save_every: int
    bar: float | None
    first_step: str
    start_s: float
    noted: Sequence[str]
    faults: int = 8
    hosts: int = 1
    left_out: Mapping[str, str] = field(default_factory=dict)

    def argv(
        self,
        contestant: Contestant,
        directory: Path,
        *,
        job: str,
        save_every: int,
        memory: str,
        ends_at: float,
        local: str = "",
    ) -> list[str]:
        """Script and arguments; `local`: the host's own disk, where it is not in `directory`."""
        if self.name == "light":
            return [
                str(ROOT / "benchmark" / "failures_workload.py"),
                *("--directory", str(directory), "--memory", memory, "--ends-at", str(ends_at)),
                *("--save", contestant.save, "--save-every", str(save_every)),
                *(["--disk", local] if local else []),
                *(["--events"] if contestant.launcher == OURS_LAUNCHER else []),
            ]
        return [
            str(ROOT / "benchmark" / "benchmark.py"),
            *("--device", "cpu", "--model", "tiny", "--job-name", job, "--log-dir", str(directory / "logs")),
            *("--log-interval", "50"),
            *_nemo_saves(contestant.save, directory, save_every),
        ]

    def notes(self, directory: Path, job: str) -> list[Note]:
        """What rank 0 noted in a run."""
        if self.name == "light":
            return read_notes(directory / "steps")
        path = events_path(RunInfo(job_name=job, run_dir=str(directory / EVENTS)))
        found = []
        for event in read_events(path, progress=False):
            if event.rank == 0 and event.step is not None:
                time = event.time.timestamp()
                if event.type is EventType.STEP_STARTED:
                    found.append(Note(time, event.step))
                elif event.type is EventType.STEP_FINISHED:
                    found.append(Note(time, event.step, time - float(str(event.fields["duration_s"]))))
        return found


def _nemo_saves(save: str, directory: Path, save_every: int) -> list[str]:
    if save == "none":
        return []
    storage = ["--persistent-ckpt-dir", str(directory / "storage"), "--persistent-ckpt-interval"]
    if save == "nemo":
        return [*storage, str(save_every), "--enable-dist-ckpt", "--enable-async-ckpt"]
    ours = ["--enable-dist-ckpt", "--enable-optimized-async-ckpt"]
    if save == "ours":
        return [*storage, str(save_every), *ours]
    local = ["--local-ckpt-dir", str(directory / "local"), "--local-ckpt-interval", str(save_every)]
    return [*storage, str(save_every * LOCAL_SAVES), *local, *ours]


def read_notes(path: Path) -> list[Note]:
    """Those of the light training; a last line that was torn by a kill is left out."""
    lines = path.read_text().split("\n")[:-1]
    return [Note(float(when), int(step)) for when, step in (line.split() for line in lines)]


def _contestants(save: str, named: str) -> dict[str, Contestant]:
    """Ours, and `save` under each launcher."""
    return {
        OURS: Contestant(launcher=OURS_LAUNCHER, save="ours"),
        "ours + local tier": Contestant(launcher=OURS_LAUNCHER, save="ours-local"),
        f"torchrun + {named}": Contestant(launcher="torchrun", save=save),
        f"ft_launcher + {named}": Contestant(launcher="ft_launcher", save=save),
        f"launcher.py + {named}": Contestant(launcher=OURS_LAUNCHER, save=save),
    }


#: Nothing fails, and nothing is saved: what was possible.
UNDISTURBED = Contestant(launcher="torchrun", save="none")
#: Part of it is ours: it tells the launcher's part from the engine's, and is no rival.
NOT_A_RIVAL = "launcher.py + "
TRAININGS = {
    training.name: training
    for training in (
        Training(
            name="light",
            description="torch and gloo, one linear layer, a checkpoint of a few MiB",
            contestants={
                **_contestants("dcp", "DCP async"),
                "ft_launcher + NVRx async": Contestant(launcher="ft_launcher", save="nvrx"),
            },
            fault_interval_s=60.0,
            save_every=50,
            bar=0.92,
            first_step=r"^first step 1$",
            start_s=180.0,
            noted=("kept_steps", "save_held"),
        ),
        Training(
            name="nemo",
            description="NeMo 2 and Megatron-core on gloo, model `tiny`, sharded checkpoints",
            contestants=_contestants("nemo", "NeMo async"),
            fault_interval_s=120.0,
            save_every=50,
            bar=0.90,
            first_step=r"\bstep 50/",  # the first that its log tells
            start_s=300.0,
            noted=("kept_steps",),
        ),
    )
}
#: The light training on several hosts, which are lost as a whole.
HOST_LOSSES = replace(
    TRAININGS["light"],
    contestants={
        OURS: Contestant(launcher=OURS_LAUNCHER, save="ours-local"),
        "torchrun + DCP async": Contestant(launcher="torchrun", save="dcp"),
        "ft_launcher + DCP async": Contestant(launcher="ft_launcher", save="dcp"),
    },
    fault_interval_s=180.0,
    faults=4,
    bar=None,
    hosts=3,
    left_out={
        "NVRx local with cliques": "a lost host fetches replicas through tensors of a GPU, also in a CPU"
        " job; and three ranks make no cliques of two",
        "dlrover-run": "its local master does not start under torch 2.13",
    },
)
