"""Sampling with Hugging Face transformers: `generate` of Qwen2 on torch, eager, with scaled dot product attention.

With `kvpress`, a press compresses while decoding: `DecodingPress` around `KnormPress`. After every `buffer`
steps each layer and KV head keeps the `budget` keys of smallest norm. No hidden states are buffered, the fastest
setting; kvpress' documentation allows it for presses that do not need them. `cache_bytes` is measured after the last
step, within one step of its maximum.

`DynamicCache`, which grows by concatenation, is the default of `generate`.
Log-probabilities come, as documented, from `output_scores` and `compute_transition_scores`, both timed.
A logits processor that changes nothing records the time of each step.
"""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import common
import generation

common.one_thread()  # before torch is imported

import torch  # noqa: E402
from torch_update import qwen2_config  # noqa: E402
from transformers import Cache, DynamicCache, LogitsProcessor, LogitsProcessorList, Qwen2ForCausalLM  # noqa: E402


class Stamp(LogitsProcessor):
    """Changes nothing; notes the time of each step."""

    def __init__(self, marks: generation.Marks, prompt: int) -> None:
        self.marks = marks
        self.prompt = prompt

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.marks.mark(input_ids.shape[1] - self.prompt)
        return scores


def sample(model: Qwen2ForCausalLM, ids: torch.Tensor, new_tokens: int, cache: Cache, stamp: Stamp) -> None:
    """Draws `new_tokens` tokens a row, none of which ends a response, and their log-probabilities."""
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=new_tokens,
        eos_token_id=None,
        pad_token_id=0,
        logits_processor=LogitsProcessorList([stamp]),
        return_dict_in_generate=True,
        output_scores=True,
        past_key_values=cache,
    )
    assert out.sequences.shape[1] == ids.shape[1] + new_tokens
    model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)


def press_of(args: SimpleNamespace) -> Any:
    """Returns a context manager factory: the model evicts inside."""
    if not args.kvpress:
        return nullcontext
    from kvpress import DecodingPress, KnormPress

    return DecodingPress(
        base_press=KnormPress(), compression_interval=args.buffer, target_size=args.budget, hidden_states_buffer_size=0
    )


@torch.no_grad()
def main() -> None:
    args = common.settings()
    press = press_of(args)
    clock = common.Clock(args, warmup=1)
    marks = generation.Marks()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = qwen2_config(args.prompt + args.new_tokens)
    config.use_cache = True
    model = Qwen2ForCausalLM(config).eval()
    ids = torch.tensor(generation.prompts(args.batch, args.prompt, common.VOCABULARY))
    stamp = Stamp(marks, args.prompt)
    for turn in range(clock.updates):
        cache = DynamicCache(config=model.config)
        clock.begin()
        marks.begin()
        with press(model):
            sample(model, ids, args.new_tokens if turn else 8, cache, stamp)  # eager: a short one warms up
        clock.end()
        if not turn:
            marks.forget()
    held = sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values))
    row = generation.row("kvpress" if args.kvpress else "hf", args, clock.seconds, marks) | {"cache_bytes": held}
    packages = ["torch", "transformers"]
    if args.kvpress:
        row |= {"budget": args.budget, "buffer": args.buffer}
        packages = ["kvpress", *packages]
    clock.say(row | clock.measured(sum(p.numel() for p in model.parameters()), packages))
    keys = max(layer.keys.shape[2] for layer in cache.layers)
    assert not args.kvpress or keys <= args.budget + args.buffer, f"expected a compressed cache; got {keys} keys"


if __name__ == "__main__":
    main()
