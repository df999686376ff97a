"""RL post-training of language models with a KV cache of fixed size, by shadow masks, in JAX."""
