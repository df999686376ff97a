"""Sampling with Tunix: its vanilla sampler, one jitted while loop over a dense cache of prompt + new tokens.

Called as its rollout worker does: temperature 1, top_p 1 without top_k (no sort of the vocabulary), log-probabilities
asked for. Prompts reach it through a tokenizer of numbers; its own decoding back to text is left with nothing to do.
No time of a single step: the loop is one program.
"""

import common
import generation

common.one_thread()  # before jax is imported

import jax  # noqa: E402
from flax import nnx  # noqa: E402
from tunix.generate.sampler import CacheConfig, Sampler  # noqa: E402
from tunix_update import qwen2  # noqa: E402

NEVER = -1  # an end of sequence that no token is


class Numbers:
    """A tokenizer whose texts are token ids, with a pad that is never drawn."""

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return ""

    def bos_id(self) -> int:
        return 0  # none is put in front

    def eos_id(self) -> int:
        return NEVER

    def pad_id(self) -> int:
        return common.VOCABULARY


def cache_bytes(sampler: Sampler, batch: int) -> int:
    """Bytes of keys and values, as the sampler will allocate them."""
    c = sampler.cache_config
    return 2 * batch * c.num_layers * c.cache_size * c.num_kv_heads * c.head_dim * sampler.dtype.dtype.itemsize


def main() -> None:
    args = generation.parser(__doc__).parse_args()
    clock = common.Clock(args, warmup=1)  # its sizes are those of the measured turns: the loop is compiled for them
    model = qwen2(True)
    config = CacheConfig(args.prompt + args.new_tokens, common.LAYERS, common.KV_HEADS, common.HEAD_DIM)
    sampler = Sampler(model, Numbers(), config)
    texts = [" ".join(map(str, ids)) for ids in generation.prompts(args.batch, args.prompt, common.VOCABULARY)]
    for turn in range(clock.updates):
        clock.begin()
        out = sampler(
            texts,
            max_generation_steps=args.new_tokens,
            max_prompt_length=args.prompt,
            temperature=1.0,
            top_p=1.0,
            return_logprobs=True,
            seed=turn,
        )
        clock.end()
        assert {len(tokens) for tokens in out.tokens} == {len(found) for found in out.logprobs} == {args.new_tokens}
    row = generation.row("tunix", args, clock.seconds)
    row |= {"cache_bytes": cache_bytes(sampler, args.batch), "logprobs": True}
    parameters = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    clock.say(row | clock.measured(parameters, ["google-tunix", "jax", "flax"]))


if __name__ == "__main__":
    main()
