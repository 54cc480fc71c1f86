# SPDX-License-Identifier: Apache-2.0
"""The CPU mode of Megatron: refused versions, complete undoing, silence on CUDA, and its optimizer.

`install` changes torch for the whole process, so everything that installs runs in one of its own.  What
that process holds when it starts is torch, or torch and NeMo.
"""

from __future__ import annotations

import sys
from importlib import metadata

import pytest
import torch

from resiliency.errors import UntestedVersion
from resiliency.testing import megatron_cpu, warm
from resiliency.testing.megatron_cpu import TESTED_VERSIONS, GroupStepAdamW, check_versions

TESTED = {name: f"{prefixes[0]}99" for name, prefixes in TESTED_VERSIONS.items()}


def run_python(code: str) -> str:
    """Output of a process of its own."""
    argv = [sys.executable, "-W", "error", "-W", "ignore:The pynvml package:FutureWarning", "-c", code]
    done = warm.run(argv, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_any_release_of_a_tested_line_is_accepted() -> None:
    check_versions(installed_version=TESTED.__getitem__)


@pytest.mark.parametrize("name", TESTED)
@pytest.mark.parametrize("found", ["0.0.1", "99.0", ""])
def test_an_untested_version_is_refused_and_both_sides_are_named(name: str, found: str) -> None:
    with pytest.raises(UntestedVersion) as caught:
        check_versions(installed_version=(TESTED | {name: found}).__getitem__)
    assert f"{name} {found} is not a version that this release was tested with" in str(caught.value)
    assert f"expected {TESTED_VERSIONS[name][0]}*" in str(caught.value)
    assert "pip install" in str(caught.value)
    assert caught.value.fields == {"distribution": name, "found": found}


@pytest.mark.parametrize("name", TESTED)
def test_a_missing_library_is_refused_with_what_to_install(name: str) -> None:
    def installed_version(distribution: str) -> str:
        if distribution == name:
            raise metadata.PackageNotFoundError(name)
        return TESTED[distribution]

    with pytest.raises(UntestedVersion) as caught:
        check_versions(installed_version=installed_version)
    assert f"{name} is not installed" in str(caught.value)
    assert f"{TESTED_VERSIONS[name][0]}*" in str(caught.value)
    assert "pip install" in str(caught.value)


#: Every attribute of everything that `install` may touch.
EVERYTHING = """
import logging, sys, types
held = set(sys.modules)
import torch
from resiliency.testing import megatron_cpu
megatron_cpu.check_versions = lambda: None  # torch is all that this process needs

def everything():
    owners = {owner for owner, _, _ in megatron_cpu._PATCHES}
    found = {(owner, name): value for owner in owners for name, value in vars(owner).items()}
    return found | {("sys", "meta_path"): list(sys.meta_path)}

def changed(before, after):
    return sorted(str(name) for (owner, name) in before.keys() | after.keys()
                  if before.get((owner, name), "none") is not after.get((owner, name), "none")
                  and name != "meta_path")
"""
NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="never active where CUDA works")


@NO_CUDA
def test_uninstalling_puts_back_every_attribute_and_install_may_be_repeated() -> None:
    out = run_python(
        EVERYTHING + "before = everything()\n"
        "assert megatron_cpu.install() and megatron_cpu.install()\n"
        "between = everything()\n"
        "assert set(changed(before, between)) == {name for _, name, _ in megatron_cpu._PATCHES}\n"
        "assert len(sys.meta_path) == len(before['sys', 'meta_path']) + 1\n"
        "megatron_cpu.uninstall(); megatron_cpu.uninstall()\n"
        "assert changed(before, everything()) == [], changed(before, everything())\n"
        "assert sys.meta_path == before['sys', 'meta_path']\n"
        "print([m for m in set(sys.modules) - held if m.startswith(('nemo', 'megatron'))])\n"
    )
    assert out == "[]"


@NO_CUDA
def test_within_it_cuda_means_the_cpu_and_afterwards_no_more() -> None:
    out = run_python(
        EVERYTHING + "from resiliency.checkpoint.capture.cuda import CudaHostRegistry\n"
        "with megatron_cpu.installed() as active:\n"
        "    assert active\n"
        "    assert torch.zeros(2, device='cuda', pin_memory=True).device.type == 'cpu'\n"
        "    assert torch.ones(2).cuda().to('cuda:0').type() == 'torch.cuda.FloatTensor'\n"
        "    assert torch.ones(2).to(device=torch.device('cuda', 0)).device.type == 'cpu'\n"
        "    assert torch.ones(2).type('torch.cuda.DoubleTensor').dtype == torch.float64\n"
        "    assert torch.cuda.current_device() == torch.device('cpu')\n"
        "    assert not torch.cuda.is_available()\n"
        "    assert CudaHostRegistry().current_device() is None\n"  # nothing is to be pinned
        "    with torch.cuda.stream(torch.cuda.Stream()) as _:\n"
        "        assert torch.cuda.current_stream().record_event().query()\n"
        "    state = torch.cuda.get_rng_state()\n"
        "    first = torch.rand(3)\n"
        "    torch.cuda.set_rng_state(state)\n"
        "    assert torch.equal(torch.rand(3), first)\n"
        "assert torch.ones(2).type() == 'torch.FloatTensor'\n"
        "try:\n"
        "    torch.zeros(2, device='cuda')\n"
        "except (AssertionError, RuntimeError):\n"
        "    print('no CUDA')\n"
    )
    assert out == "no CUDA"


def test_nothing_is_touched_where_torch_says_that_a_cuda_device_works() -> None:
    """The answer of torch is replaced, and nothing else.

    That is honest, because `install` asks nothing but ``torch.cuda.is_available``: what is tested
    is what we do after the answer, and the answer itself is torch's.  A GPU machine runs the test
    below, in which it is true.
    """
    out = run_python(
        EVERYTHING + "torch.cuda.is_available = lambda: True\n"
        "before = everything()\n"
        "print(megatron_cpu.install())\n"
        "assert changed(before, everything()) == []\n"
        "assert sys.meta_path == before['sys', 'meta_path']\n"
        "with megatron_cpu.installed() as active:\n"
        "    assert not active\n"
        "    assert changed(before, everything()) == []\n"
        "assert changed(before, everything()) == []\n"
    )
    assert out == "False"


@pytest.mark.gpu
def test_on_a_real_cuda_device_nothing_is_touched() -> None:
    out = run_python(
        EVERYTHING + "before = everything()\n"
        "print(megatron_cpu.install())\n"
        "assert changed(before, everything()) == []\n"
        "assert torch.zeros(2, device='cuda').is_cuda\n"
    )
    assert out == "False"


@NO_CUDA
@pytest.mark.parametrize("problem", ["missing", "untested"])
def test_a_refused_version_leaves_torch_untouched(problem: str) -> None:
    found = "raise metadata.PackageNotFoundError(name)" if problem == "missing" else "return '0.0.1'"
    out = run_python(
        "from importlib import metadata\n"
        "def version(name):\n"
        f"    {found}\n"
        "import torch\n"
        "from resiliency.errors import UntestedVersion\n"
        "from resiliency.testing import megatron_cpu\n"
        "megatron_cpu.check_versions.__defaults__ = (megatron_cpu.TESTED_VERSIONS, version)\n"
        "before = dict(vars(torch.cuda))\n"
        "try:\n"
        "    megatron_cpu.install()\n"
        "except UntestedVersion as error:\n"
        "    print(error)\n"
        "assert dict(vars(torch.cuda)) == before\n"
    )
    assert "nemo_toolkit" in out


def parameters(seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((7, 5), (3,), (1,))]


def train(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter], steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()


#: The first optimizer step of a process makes torch import its compiler.
STEPS_AN_OPTIMIZER = pytest.mark.leaks("variables", reason="the first step sets TORCHINDUCTOR_CACHE_DIR")
HYPERPARAMETERS = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


@STEPS_AN_OPTIMIZER
@pytest.mark.parametrize("options", [{}, {"foreach": False}, {"amsgrad": True}], ids=str)
def test_the_optimizer_computes_the_very_bits_of_torchs_adamw(options: dict[str, bool]) -> None:
    ours, theirs = parameters(), parameters()
    train(GroupStepAdamW(ours, **HYPERPARAMETERS, **options), ours, range(10))
    train(torch.optim.AdamW(theirs, **HYPERPARAMETERS, **options), theirs, range(10))
    for mine, reference in zip(ours, theirs, strict=True):
        assert torch.equal(mine, reference)


@STEPS_AN_OPTIMIZER
def test_the_step_is_counted_in_the_group_and_in_no_parameter() -> None:
    params = parameters()
    optimizer = GroupStepAdamW(params, adam_w_mode=True, **HYPERPARAMETERS)
    train(optimizer, params, range(4))
    state = optimizer.state_dict()
    assert [group["step"] for group in state["param_groups"]] == [4]
    assert all(set(entry) == {"exp_avg", "exp_avg_sq"} for entry in state["state"].values())


@STEPS_AN_OPTIMIZER
def test_a_loaded_optimizer_goes_on_with_the_very_bits_of_one_that_was_never_saved() -> None:
    straight = parameters()
    train(GroupStepAdamW(straight, **HYPERPARAMETERS), straight, range(10))

    params = parameters()
    first = GroupStepAdamW(params, **HYPERPARAMETERS)
    train(first, params, range(6))
    saved = first.state_dict()
    second = GroupStepAdamW(params, lr=99.0)
    second.load_state_dict(saved)
    assert second.state_dict()["param_groups"] == saved["param_groups"]
    train(second, params, range(6, 10))
    for mine, reference in zip(params, straight, strict=True):
        assert torch.equal(mine, reference)


def test_the_settings_for_the_cpu_turn_off_every_kernel_that_it_lacks() -> None:
    on = {name for name, value in megatron_cpu.CPU_MODEL_CONFIG.items() if value}
    assert on == {"use_cpu_initialization"}


def test_leaving_an_inner_context_leaves_the_outer_one_active() -> None:
    run_python(
        """
from resiliency.testing import megatron_cpu
import torch

with megatron_cpu.installed():
    with megatron_cpu.installed():
        pass
    assert torch.zeros(1, device="cuda").device.type == "cpu"
assert not megatron_cpu._saved
"""
    )
