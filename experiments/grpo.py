"""GRPO with a fixed-size KV cache: the whole algorithm in one file.

    python experiments/grpo.py                                   a random two-layer model, 20 seconds on two cores
    python experiments/grpo.py --model runs/smollm2 --steps 3    a Hugging Face checkpoint

Each step samples completions while the cache keeps `budget` keys, then replays the recorded evictions in the learner.
Both compute the same policy, so the largest |Δ log p| printed in each line is rounding, about 1e-6 in float32.
`--dense` trains a learner that ignores the evictions; the same column then shows how far off it is.

This file differs from `smd-train` in what it leaves out: checkpoints, evaluation, several devices, microbatches.
"""

import argparse
import tempfile
from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
from transformers import AutoTokenizer

import smd_jax as smd
from smd_jax.testing import write_random_checkpoint

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="Hugging Face checkpoint directory; default: a random model")
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--dense", action="store_true", help="the learner ignores the evictions")
parser.add_argument("--out", help="the trained model is its folder `trained`; default: a temporary one")
args = parser.parse_args()

PROMPTS, GROUP = 8, 8  # prompts per step, completions per prompt
PROMPT_WIDTH, NEW_TOKENS = 32, 48
BUDGET, BUFFER = 16, 8  # keys kept per layer and KV head; tokens between two compressions
CLIP = 0.2


# 1. Model, tokenizer, optimizer. Parameters are a plain pytree.
directory = args.model
if directory is None:
    directory = tempfile.mkdtemp()
    write_random_checkpoint(directory)
config, params = smd.load_checkpoint(directory)
model = smd.Decoder(config)
tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3 if args.model is None else 1e-5))
opt_state = optimizer.init(params)

# 2. The sampler: at most BUDGET + BUFFER keys are cached, however long the completion.
policy = smd.eviction.SnapKV(window=4)
rollout_config = smd.RolloutConfig(
    max_new_tokens=NEW_TOKENS,
    budget=BUDGET,
    buffer=BUFFER,
    eos_token_id=tokenizer.eos_token_id,
    pad_token_id=tokenizer.pad_token_id,
)


# 3. A reward function with TRL's signature: the share of lowercase letters.
def reward(prompts: list[str], completions: list[str], **columns: list) -> list[float]:
    return [sum("a" <= c <= "z" for c in text) / max(len(text), 1) for text in completions]


# 4. The loss of a batch, and its optimizer step.
@jax.jit
def update(params, opt_state, trajectory, advantages):
    def loss_fn(params):
        # One teacher-forced forward pass under the mask of the rollout: log-probabilities [batch, NEW_TOKENS].
        logprobs = smd.replay(model, params, trajectory).logprobs
        ratio = jnp.exp(logprobs - trajectory.logprobs)
        clipped = jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
        objective = jnp.minimum(ratio * advantages[:, None], clipped * advantages[:, None])
        mask = trajectory.response_mask
        difference = jnp.abs(logprobs - trajectory.logprobs).max(where=mask, initial=0.0)
        return -objective.mean(where=mask), difference

    (loss, difference), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss, difference


# 5. The loop: prompts -> rollout -> rewards -> advantages -> update.
TOPICS = ("cats", "dogs", "rain", "tea")
for step in range(args.steps):
    texts = [f"Write about {TOPICS[(step + i) % len(TOPICS)]}: " for i in range(PROMPTS)]
    prompts = smd.encode_prompts(tokenizer, texts, width=PROMPT_WIDTH, add_special_tokens=True)
    key = jax.random.key(step)
    trajectory = smd.rollout(model, params, prompts, key, policy=policy, config=rollout_config, group_size=GROUP)
    completions = smd.decode_completions(tokenizer, trajectory.response, trajectory.response_mask)
    rewards = jnp.array(reward([text for text in texts for _ in range(GROUP)], completions))
    advantages = smd.group_relative(rewards, GROUP)
    learned = replace(trajectory, mask=trajectory.dense_mask()) if args.dense else trajectory
    params, opt_state, loss, difference = update(params, opt_state, learned, advantages)
    print(f"{step:3d}  reward {rewards.mean():.3f}  loss {loss:+.4f}  largest |Δ log p| {difference:.1e}")

# 6. The trained model, as Hugging Face opens it.
out = args.out or tempfile.mkdtemp()
smd.save_checkpoint(f"{out}/trained", params, config, tokenizer_from=directory)
print(f"saved in {out}/trained")
