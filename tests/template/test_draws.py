# SPDX-License-Identifier: Apache-2.0
"""What modules keep of their import, and each fresh process has for itself, each forked one has, too."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from tests.template.programs import environment, ready_template, run, write_modules

DRAWS = "draws random numbers while it is imported"
TIME = "keeps the time in kept"
#: Name -> source of a module that each rank has to import for itself, and what it is said to do.
OWN_IMPORT = {
    "urandom": ("import os\nkept = os.urandom(8).hex()", DRAWS),
    "getrandom": ("import os\nkept = os.getrandom(8).hex()", DRAWS),
    "uuid4": ("import uuid\nkept = str(uuid.uuid4())", DRAWS),
    "uuid1": ("import uuid\nkept = str(uuid.uuid1())", DRAWS),
    "secret": ("import secrets\nkept = secrets.token_hex()", DRAWS),
    "by_a_function": ("import os\ndef name(): return f'run-{os.urandom(4).hex()}'\nkept = name()", DRAWS),
    "drawn_too": ("import random\nkept = random.Random().random()", DRAWS),
    "drawn": ("import random\nkept = random.Random().random()", DRAWS),
    "drawn_and_kept": ("import random\nrng = random.Random()\nkept = rng.random()", DRAWS),
    "choice": (
        "import random\nkept = random.choice(range(10**9))",
        "seeds or draws random numbers of random",
    ),
    "numpy_draw": ("import numpy\nkept = numpy.random.rand()", "seeds or draws random numbers of numpy"),
    "numpy_generator": ("import numpy\nkept = numpy.random.default_rng().random()", DRAWS),
    "numpy_state": ("import numpy\nkept = numpy.random.RandomState().rand()", DRAWS),
    "pid": ("import os\nkept = os.getpid()", "reads its process id while it is imported"),
    "thread": (
        "import threading\nkept = threading.get_native_id()",
        "reads its process id while it is imported",
    ),
    "pid_in_a_name": (
        "from os import getpid\nkept = f'/tmp/x-{getpid()}'",
        "reads its process id while it is imported",
    ),
    "clock": ("import time\nkept = time.perf_counter()", TIME),
    "clock_ns": ("import time\nkept = time.monotonic_ns() // 1000 * 1000 + 1", TIME),
    "wall_ns": ("import time\nkept = time.time_ns()", TIME),
    "date": ("import datetime\nnow = datetime.datetime.now()\nkept = str(now)", "keeps the time in now"),
    "of_a_class": (
        "import datetime\nclass A:\n    kept = datetime.datetime.utcnow().isoformat()\nkept = A.kept",
        TIME,
    ),
    "of_a_closed_class": (
        "import time\nclass Closed(type):\n    def __setattr__(self, name, value): raise TypeError\n"
        "class A(metaclass=Closed):\n    kept = time.time()\ndef kept(): return A.kept",
        TIME,
    ),
    "timer": ("import signal\nkept = signal.setitimer(signal.ITIMER_PROF, 1000)", "sets a timer"),
    "alarm": ("import signal\nkept = signal.alarm(1000)", "sets a timer"),
    "temporary": ("import tempfile\nkept = tempfile.mkdtemp()", "makes a temporary file"),
    "later": (
        "import faulthandler\nkept = faulthandler.dump_traceback_later(1000)",
        "starts a thread (python)",
    ),
}
#: Of text that tells the second: two forks within one second are equal, and may be.
SECONDS = {
    "stamp": ("import time\nkept = time.strftime('%Y%m%d-%H%M%S')", TIME),
    "whole": ("import time\nkept = int(time.time())", TIME),
    "run_id": ("import time\nkept = f'run_{time.time():.0f}'", TIME),
}
#: Source of a module that is held, and whose value is made again in each rank.
RENEWED = {
    "generator": "import random\nrng = random.Random()\ndef kept(): return rng.random()",
    "in_a_class": "import random\nclass A:\n    rng = random.Random()\ndef kept(): return A.rng.random()",
    "as_a_default": "import random\ndef kept(rng=random.Random()): return rng.random()",
    "system": "import random\nrng = random.SystemRandom()\ndef kept(): return rng.random()",
    "start": "import time\nSTART = time.time()\ndef kept(): return START",
    "start_by_name": "from time import time\nclass A:\n    start = time()\ndef kept(): return A.start",
    "records": "import logging\ndef kept(): return logging._startTime",
}
#: Source of a module that is held as it is: equal in all fresh processes, or of no consequence.
SAME = {
    "seeded": "import random\nrng = random.Random(42)\ndef kept(): return rng.random()",
    "seeded_later": "import random\nrng = random.Random()\nrng.seed(3)\nkept = rng.random",
    "numpy_seeded": "import numpy\nrng = numpy.random.default_rng(7)\ndef kept(): return rng.random()",
    "function": "from os import getpid\nfrom time import time\ndef kept(): return str([getpid, time])",
    "year": "import time\nkept = time.strftime('%Y').title",
    "measured": "import time\nbegan = time.time()\nprint(time.time() - began)\ndel began\nkept = str",
    "held": "import threading\nlock = threading.RLock()\nlock.acquire()\ndef kept(): return lock.release()",
    "constants": "degree, faraday, when = 57.29577951308232, 96485.33212, '12:30:45'\nkept = str",
}


def test_what_imports_draw_is_each_ranks_own(tmp_path: Path) -> None:
    left_out = {**OWN_IMPORT, **SECONDS}
    sources = {name: source for name, (source, _) in left_out.items()}
    write_modules(tmp_path, **sources, **RENEWED, **SAME)
    env = environment(PYTHONPATH=str(tmp_path))
    code = (
        "import importlib, json, signal, sys\n"
        "found = {}\n"
        "for name in sys.argv[1:]:\n"
        "    here = name in sys.modules\n"
        "    kept = importlib.import_module(name).kept\n"
        "    found[name] = here, kept() if callable(kept) else str(kept)\n"
        "print(json.dumps(found))\n"
    )
    names = [*sources, *RENEWED, *SAME]
    with ready_template(*names, env=env) as template:
        assert template.left_out == {name: why for name, (_, why) in left_out.items()}
        ends = [run(template, "-c", code, *names, env=env) for _ in range(2)]
        assert template.unsafe == ""
    one, other = (json.loads(end.out.splitlines()[-1]) for end in ends)
    for found in (one, other):
        assert {name for name, (here, _) in found.items() if here} == {*RENEWED, *SAME}
    equal = {name for name in names if one[name] == other[name]}
    assert equal - {"timer", "alarm", "later", *SECONDS} == {*SAME}
    assert equal >= {*SAME}


def test_a_lock_that_a_killed_rank_held_is_free_in_the_next_one(tmp_path: Path) -> None:
    write_modules(tmp_path, locks="import multiprocessing\nkept = multiprocessing.Lock()\n")
    env = environment(PYTHONPATH=str(tmp_path))
    take = "import locks, os, signal\nprint(locks.kept.acquire(timeout=5), flush=True)\n"
    with ready_template("locks", env=env) as template:
        for end in ("os.kill(os.getpid(), signal.SIGKILL)", ""):
            ended = run(template, "-c", take + end, env=env)
            assert (ended.out, ended.code) == ("True\n", -signal.SIGKILL if end else 0), ended.err
