# SPDX-License-Identifier: Apache-2.0
"""Train with Accelerate on data that survives: each sample once per epoch, on any number of ranks.

    torchrun --nproc-per-node 2 examples/accelerate_data.py --output-dir /tmp/accelerate

Kill it in the middle and start it again, also with another --nproc-per-node: it goes on with the next sample.
The script counts how often each sample was in an optimizer step, and ends with an error if that is ever not
once per epoch.
"""

from __future__ import annotations

import argparse
import os

import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader, TensorDataset

from resiliency.data import InterruptableDistributedSampler, advancing, atomic_torch_save

SIZE = 800


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output-dir", required=True)
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    features = torch.randn(SIZE, 16, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(torch.arange(SIZE), features)
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))

    # The sampler deals to the ranks, so the loader is prepared as for one process: it moves batches to the
    # device, and tells the accelerator where an epoch ends.
    sampler = InterruptableDistributedSampler(data)
    loader = prepare_data_loader(
        DataLoader(data, batch_size=8, sampler=sampler, num_workers=1),
        accelerator.device,
        num_processes=1,
        process_index=0,
        put_on_device=True,
    )
    os.makedirs(options.output_dir, exist_ok=True)
    path = os.path.join(options.output_dir, "state.pt")
    step, trained = 0, torch.zeros(SIZE, dtype=torch.int64)
    parts = {"model": accelerator.unwrap_model(model), "optimizer": optimizer, "sampler": sampler}
    if os.path.exists(path):
        saved = torch.load(path)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        step, trained = saved["step"], saved["trained"]
    accelerator.print(f"{accelerator.num_processes} ranks start after step {step}", flush=True)

    for epoch in range(sampler.epoch, options.epochs):
        sampler.set_epoch(epoch)
        in_gradients = torch.zeros_like(trained)
        for numbers, inputs in advancing(loader, optimizer):
            with accelerator.accumulate(model):
                loss = (model(inputs).squeeze(1) - inputs.sum(1)).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                in_gradients[numbers] += 1
            if accelerator.sync_gradients:
                trained += accelerator.reduce(in_gradients)
                in_gradients.zero_()
                step += 1
                accelerator.print(f"step {step} epoch {epoch}", flush=True)
                if accelerator.is_main_process and step % 5 == 0:
                    state = {name: part.state_dict() for name, part in parts.items()}
                    atomic_torch_save({**state, "step": step, "trained": trained}, path)
        if not bool((trained == epoch + 1).all()):
            raise SystemExit(f"epoch {epoch}: samples were trained on {trained.unique().tolist()} times")
    accelerator.print(f"done: every sample once in each of {options.epochs} epochs", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
