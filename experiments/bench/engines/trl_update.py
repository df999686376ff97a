"""A GRPO update of TRL: GRPOTrainer.train() with its defaults, without generation.

The trainer's own loop runs: gradient accumulation, its loss ("dapo"), clipping of the gradient's norm, fused AdamW,
metrics, no KL. Only `_generate_and_score_completions` is replaced; it returns random completions.
Settings other than the defaults: no gradient checkpointing, float32, a constant learning rate, nothing logged or saved.
"""

import tempfile

import common

common.one_thread()  # before torch is imported

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from torch_update import qwen2_config  # noqa: E402
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM  # noqa: E402
from trl import GRPOTrainer  # noqa: E402
from trl_settings import Timer, grpo_config  # noqa: E402


def tokenizer() -> PreTrainedTokenizerFast:
    """A vocabulary of numbers: the trainer requires a tokenizer, but nothing here is text."""
    words = {str(number): number for number in range(common.VOCABULARY)}
    made = Tokenizer(models.WordLevel(words, unk_token="0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="0", eos_token="0")


class Trainer(GRPOTrainer):
    """GRPOTrainer with precomputed completions."""

    def _generate_and_score_completions(self, inputs: list) -> dict:
        return dict(self.completions)


def random_completions(sequences: int, prompt: int, response: int) -> dict:
    """Random completions in the format that the trainer's own generation returns."""
    tokens = torch.randint(1, common.VOCABULARY, (sequences, prompt + response))
    mask = torch.ones_like(tokens)
    return {
        "prompt_ids": tokens[:, :prompt],
        "prompt_mask": mask[:, :prompt],
        "completion_ids": tokens[:, prompt:],
        "completion_mask": mask[:, prompt:],
        "advantages": torch.tensor(common.advantages(sequences)),
        "num_items_in_batch": mask[:, prompt:].sum(),
    }


def main() -> None:
    args = common.settings()
    clock = common.Clock(args)
    torch.set_num_threads(1)
    model = Qwen2ForCausalLM(qwen2_config(args.tokens))
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            reward_funcs=lambda completions, **columns: [0.0] * len(completions),
            args=grpo_config(
                folder,
                rows=args.sequences,
                microbatch=args.microbatch,
                group=min(common.GROUP, args.sequences),
                new_tokens=args.tokens - args.prompt,
                steps=clock.updates,
            ),
            train_dataset=Dataset.from_dict({"prompt": ["1"] * args.sequences}),
            processing_class=tokenizer(),
            callbacks=[Timer(clock)],
        )
        trainer.completions = random_completions(args.sequences, args.prompt, args.tokens - args.prompt)
        trainer.train()
    clock.report("trl", sum(p.numel() for p in model.parameters()), ["trl", "torch", "transformers"])


if __name__ == "__main__":
    main()
