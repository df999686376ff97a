"""Sampling with kvpress: `generate` as in `hf_rollout.py`, under a press that compresses while decoding.

`DecodingPress` around `KnormPress`: after every `buffer` steps each layer and KV head keeps the `budget` keys of
smallest norm. No hidden states are buffered, the fastest setting; kvpress' documentation allows it for presses that do
not need them. `cache_bytes` is measured after the last step, within one step of its maximum.
"""

import common

common.one_thread()  # before torch is imported

from hf_rollout import run  # noqa: E402
from kvpress import DecodingPress, KnormPress  # noqa: E402


def main() -> None:
    args = common.settings()
    press = DecodingPress(
        base_press=KnormPress(), compression_interval=args.buffer, target_size=args.budget, hidden_states_buffer_size=0
    )
    more = {"budget": args.budget, "buffer": args.buffer}
    cache = run("kvpress", args, ["kvpress", "torch", "transformers"], press, more)
    keys = {layer.keys.shape[2] for layer in cache.layers}
    assert max(keys) <= args.budget + args.buffer, f"expected a compressed cache; got {keys} keys"


if __name__ == "__main__":
    main()
