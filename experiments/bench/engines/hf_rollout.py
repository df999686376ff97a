"""Sampling with Hugging Face transformers: `generate` of Qwen2 on torch, eager, with scaled dot product attention.

`DynamicCache`, which grows by concatenation, is the default of `generate`; `--static` takes its cache of fixed size.
Log-probabilities are asked for as documented: `output_scores`, then `compute_transition_scores`, both in the time.
A logits processor that changes nothing notes when each step came.
"""

import argparse

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


def build(max_tokens: int) -> Qwen2ForCausalLM:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = qwen2_config(True, max_tokens)
    config.use_cache = True
    return Qwen2ForCausalLM(config).eval()


def sample(
    model: Qwen2ForCausalLM, ids: torch.Tensor, new_tokens: int, cache: Cache | None, stamp: Stamp, scores: bool
) -> torch.Tensor:
    """Draws `new_tokens` tokens a row, none of which ends a response; their log-probabilities."""
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
        output_scores=scores,
        **({"cache_implementation": "static"} if cache is None else {"past_key_values": cache}),
    )
    assert out.sequences.shape[1] == ids.shape[1] + new_tokens
    if not scores:
        return out.sequences
    return model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)


def held(cache: Cache | None) -> int | None:
    """Bytes of keys and values."""
    if cache is None:
        return None
    return sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values))


@torch.no_grad()
def main() -> None:
    parser = generation.parser(__doc__)
    parser.add_argument("--static", action="store_true", help="a cache of fixed size")
    parser.add_argument("--scores", action=argparse.BooleanOptionalAction, default=True, help="log-probabilities")
    args = parser.parse_args()
    clock = common.Clock(args, warmup=1)
    marks = generation.Marks()
    model = build(args.prompt + args.new_tokens)
    ids = torch.tensor(generation.prompts(args.batch, args.prompt, common.VOCABULARY))
    stamp = Stamp(marks, args.prompt)
    cache = None
    for turn in range(clock.updates):
        cache = None if args.static else DynamicCache(config=model.config)
        clock.begin()
        marks.begin()
        sample(model, ids, args.new_tokens if turn else 8, cache, stamp, args.scores)  # eager: a short one warms up
        clock.end()
        if not turn:
            marks.forget()
    row = generation.row("hf-static" if args.static else "hf", args, clock.seconds, marks)
    row |= {"cache_bytes": held(cache), "logprobs": args.scores}
    clock.say(row | clock.measured(sum(p.numel() for p in model.parameters()), ["torch", "transformers"]))


if __name__ == "__main__":
    main()
