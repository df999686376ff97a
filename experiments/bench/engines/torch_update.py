"""A GRPO update in plain torch: transformers' Qwen2 with scaled dot product attention, and ten lines of loss.

The shortest loop that a user would write: logits of the completion only, no entropy, no metrics, fused AdamW.
"""

import common

common.one_thread()  # before torch is imported

import torch  # noqa: E402
from transformers import Qwen2Config, Qwen2ForCausalLM  # noqa: E402


def qwen2_config(max_tokens: int) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=common.VOCABULARY,
        hidden_size=common.MODEL.hidden_size,
        intermediate_size=common.MODEL.intermediate_size,
        num_hidden_layers=common.MODEL.num_layers,
        num_attention_heads=common.MODEL.num_heads,
        num_key_value_heads=common.MODEL.num_kv_heads,
        head_dim=common.MODEL.head_dim,
        max_position_embeddings=max_tokens,
        rope_parameters={"rope_type": "default", "rope_theta": common.ROPE_THETA},
        rms_norm_eps=common.NORM_EPS,
        initializer_range=common.INIT_STD,
        tie_word_embeddings=True,
        use_cache=False,
        attn_implementation="sdpa",
    )


def policy_loss(model: Qwen2ForCausalLM, tokens: torch.Tensor, advantages: torch.Tensor, prompt: int) -> torch.Tensor:
    """Negative mean over tokens of the clipped surrogate."""
    response = tokens[:, prompt:]
    logits = model(tokens, logits_to_keep=response.shape[1] + 1).logits[:, :-1]
    logprobs = logits.gather(-1, response[..., None])[..., 0] - logits.logsumexp(-1)
    ratio = torch.exp(logprobs - logprobs.detach())
    surrogate = torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
    return -surrogate.mean()


def main() -> None:
    args = common.settings()
    clock = common.Clock(args)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(qwen2_config(args.tokens)).train()
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=common.LEARNING_RATE,
        betas=common.BETAS,
        eps=common.ADAM_EPS,
        weight_decay=common.WEIGHT_DECAY,
        fused=True,
    )
    tokens = torch.randint(1, common.VOCABULARY, (args.sequences, args.tokens))
    advantages = torch.tensor(common.advantages(args.sequences))
    parts = args.sequences // args.microbatch
    for _ in range(clock.updates):
        clock.begin()
        for rows, weights in zip(tokens.split(args.microbatch), advantages.split(args.microbatch), strict=True):
            (policy_loss(model, rows, weights, args.prompt) / parts).backward()
        optimizer.step()
        optimizer.zero_grad()
        clock.end()
    clock.report("torch", sum(p.numel() for p in model.parameters()), ["torch", "transformers"])


if __name__ == "__main__":
    main()
