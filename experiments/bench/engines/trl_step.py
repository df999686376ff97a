"""A whole GRPO step of TRL: GRPOTrainer.train() with transformers' `generate`, as its defaults have it.

Settings other than the defaults: no gradient checkpointing (it would compute the forward pass twice), float32 instead
of bfloat16, a constant learning rate, nothing logged or saved, and the sizes of the benchmark: as many microbatches are
accumulated as a step has, so that one optimizer step follows one generation of all completions. With --full-length the
end of a response is suppressed until its last token. Eager: the warm-up step draws 8 tokens only.
"""

from __future__ import annotations

import argparse
import tempfile

import common
import whole_step

common.use_threads(common.asked_threads())  # before torch is imported

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

WARM_UP = 8  # tokens of a completion of the first step


class Reward:
    """The grader with TRL's signature; remembers how long prompts and completions were."""

    __name__ = "reward"  # under which TRL logs it

    def __init__(self, grader: whole_step.Grader, tokenizer: PreTrainedTokenizerBase) -> None:
        self.grader = grader
        self.tokenizer = tokenizer
        self.tokens: list[tuple[int, int]] = []

    def __call__(self, prompts, completions, completion_ids, answer, **columns) -> list[float]:
        rewards = self.grader([messages[-1]["content"] for messages in completions], answer)
        read = [self.tokenizer.apply_chat_template(p, add_generation_prompt=True)["input_ids"] for p in prompts]
        self.tokens = [(len(before), len(ids)) for before, ids in zip(read, completion_ids, strict=True)]
        return rewards


class Timer(TrainerCallback):
    """The clock runs from before the generation of a step to the end of its update."""

    def __init__(self, clock: whole_step.StepClock, reward: Reward, new_tokens: int) -> None:
        self.clock = clock
        self.reward = reward
        self.new_tokens = new_tokens
        self.trainer: GRPOTrainer | None = None

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        length(self.trainer, self.new_tokens if self.clock.begun else WARM_UP)
        self.clock.begin()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.clock.end_step(self.reward.tokens)


def length(trainer: GRPOTrainer, new_tokens: int) -> None:
    """Lets the trainer draw so many tokens; as few, too, where no token may end a completion."""
    config = trainer.generation_config
    kwargs = trainer.generation_kwargs
    config.max_new_tokens = kwargs["max_new_tokens"] = new_tokens
    if config.min_new_tokens is not None:
        config.min_new_tokens = kwargs["min_new_tokens"] = new_tokens


def grpo_config(args: argparse.Namespace, updates: int, folder: str) -> GRPOConfig:
    return GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=args.microbatch,
        gradient_accumulation_steps=args.completions // args.microbatch,
        num_generations=args.group,
        max_completion_length=args.new_tokens,
        generation_kwargs={"min_new_tokens": args.new_tokens} if args.full_length else None,
        max_steps=updates,
        learning_rate=common.LEARNING_RATE,
        lr_scheduler_type="constant",
        adam_beta1=common.BETAS[0],
        adam_beta2=common.BETAS[1],
        adam_epsilon=common.ADAM_EPS,
        weight_decay=common.WEIGHT_DECAY,
        max_grad_norm=whole_step.MAX_GRADIENT_NORM,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def main() -> None:
    args = whole_step.parser(__doc__).parse_args()
    grader = whole_step.Grader()
    clock = whole_step.StepClock(args, grader)
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    reward = Reward(grader, tokenizer)
    timer = Timer(clock, reward, args.new_tokens)
    rows = [
        {"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]}
        for row in whole_step.problems(args)
    ]
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=grpo_config(args, clock.updates, folder),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[timer],
        )
        timer.trainer = trainer
        trainer.train()
    parameters = sum(p.numel() for p in model.parameters())
    clock.report_steps("trl", parameters, ["trl", "torch", "transformers", "accelerate"])


if __name__ == "__main__":
    main()
