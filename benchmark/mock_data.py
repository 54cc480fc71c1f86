# SPDX-License-Identifier: Apache-2.0
"""Mock data that resumes at the sample where it stopped."""

from __future__ import annotations

from typing import Any

from nemo.collections.llm.gpt.data.mock import MockDataModule, _MockGPTDataset


class ResumableMockData(MockDataModule):
    """NeMo's mock data, with a position that is saved and an attention mask that arrives.

    NeMo 2.7's own module has no `state_dict`, so a resumed run would read its samples again from
    the first one; and its `setup` passes the mask flag in the position of the seed, so that without
    Transformer Engine the model gets no mask and fails.
    """

    #: Steps that were finished when this process began to train.
    _first_step = 0

    def setup(self, stage: str = "") -> None:
        counts = {
            "train": self.num_train_samples,
            "validation": self.num_val_samples,
            "test": self.num_test_samples,
        }
        for name, count in counts.items():
            dataset = _MockGPTDataset(
                self.tokenizer, name, count, self.seq_length, create_attention_mask=self.create_attention_mask
            )
            setattr(self, f"_{name}_ds", dataset)

    def train_dataloader(self) -> Any:
        self._first_step = self.data_sampler.init_global_step = self.trainer.global_step
        return super().train_dataloader()

    def state_dict(self) -> dict[str, int]:
        steps = self.trainer.global_step - self._first_step
        return {"consumed_samples": self.data_sampler.compute_consumed_samples(steps)}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        from megatron.core.num_microbatches_calculator import update_num_microbatches

        consumed = state_dict["consumed_samples"]
        self.data_sampler.init_consumed_samples = self.data_sampler.prev_consumed_samples = consumed
        update_num_microbatches(consumed_samples=consumed, consistency_check=False)
        self.data_sampler.if_first_step = 1
