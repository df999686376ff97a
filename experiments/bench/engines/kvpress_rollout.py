"""Sampling with kvpress: `generate` as in `hf_rollout.py`, under a press that compresses while decoding.

`DecodingPress` around `KnormPress`: after every `--buffer` steps each layer and KV head keeps its `--budget` keys of
least norm.
No hidden states are buffered, which its documentation allows for presses that do not need them: the fastest setting.
It measures the cache at the end, when it is largest but for a step.
"""

import argparse

import common
import generation

common.one_thread()  # before torch is imported

import torch  # noqa: E402
from hf_rollout import Stamp, build, held, sample  # noqa: E402
from kvpress import DecodingPress, KnormPress  # noqa: E402
from transformers import DynamicCache  # noqa: E402


@torch.no_grad()
def main() -> None:
    parser = generation.parser(__doc__)
    parser.add_argument("--scores", action=argparse.BooleanOptionalAction, default=True, help="log-probabilities")
    args = parser.parse_args()
    clock = common.Clock(args, warmup=1)
    marks = generation.Marks()
    model = build(args.prompt + args.new_tokens)
    ids = torch.tensor(generation.prompts(args.batch, args.prompt, common.VOCABULARY))
    stamp = Stamp(marks, args.prompt)
    press = DecodingPress(
        base_press=KnormPress(), compression_interval=args.buffer, target_size=args.budget, hidden_states_buffer_size=0
    )
    cache = DynamicCache(config=model.config)
    for turn in range(clock.updates):
        cache = DynamicCache(config=model.config)
        clock.begin()
        marks.begin()
        with press(model):
            sample(model, ids, args.new_tokens if turn else 8, cache, stamp, args.scores)  # eager: a short one warms up
        clock.end()
        if not turn:
            marks.forget()
    keys = {layer.keys.shape[2] for layer in cache.layers}
    assert max(keys) <= args.budget + args.buffer, f"expected a compressed cache; got {keys} keys"
    row = generation.row("kvpress", args, clock.seconds, marks)
    row |= {"budget": args.budget, "buffer": args.buffer, "cache_bytes": held(cache), "logprobs": args.scores}
    packages = ["kvpress", "torch", "transformers"]
    clock.say(row | clock.measured(sum(p.numel() for p in model.parameters()), packages))


if __name__ == "__main__":
    main()
