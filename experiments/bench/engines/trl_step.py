"""A whole GRPO step of TRL: GRPOTrainer.train() with transformers' `generate`. Started by `bench/step.py`.

Settings other than the defaults: no gradient checkpointing, float32, a constant learning rate, nothing logged or saved;
microbatches are accumulated, so that one optimizer step follows one generation of all completions. EOS is
suppressed until the last token of a completion. The first step samples 8 tokens per completion.
"""

from __future__ import annotations

import tempfile

import common
import whole_step

common.one_thread()  # before torch is imported

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402
from trl import GRPOTrainer  # noqa: E402
from trl_settings import Timer, grpo_config  # noqa: E402

WARM_UP = 8  # tokens of a completion of the first step


class StepTimer(Timer):
    """Sets the length of a step's completions, shorter in the first step."""

    def __init__(self, clock: whole_step.StepClock, new_tokens: int) -> None:
        super().__init__(clock)
        self.new_tokens = new_tokens
        self.trainer: GRPOTrainer | None = None

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        new_tokens = self.new_tokens if self.clock.begun else WARM_UP
        config, kwargs = self.trainer.generation_config, self.trainer.generation_kwargs
        config.max_new_tokens = config.min_new_tokens = new_tokens
        kwargs["max_new_tokens"] = kwargs["min_new_tokens"] = new_tokens
        self.clock.begin()


def main() -> None:
    args = common.settings()
    graded = whole_step.Reward()
    clock = whole_step.StepClock(args, graded)
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)

    def reward(completions, **columns) -> list[float]:
        return graded([messages[-1]["content"] for messages in completions])

    timer = StepTimer(clock, args.new_tokens)
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in whole_step.questions(args)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=grpo_config(
                folder,
                rows=args.completions,
                microbatch=args.microbatch,
                group=args.group,
                new_tokens=args.new_tokens,
                steps=clock.updates,
                generation_kwargs={"min_new_tokens": args.new_tokens},
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(args.model),
            callbacks=[timer],
        )
        timer.trainer = trainer
        trainer.train()
    parameters = sum(p.numel() for p in model.parameters())
    clock.report_steps("trl", parameters, ["trl", "torch", "transformers", "accelerate"])


if __name__ == "__main__":
    main()
