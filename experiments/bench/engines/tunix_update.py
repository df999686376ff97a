"""A GRPO update of Tunix: the jitted train step of its RL trainer with its "grpo" loss, as GRPOLearner joins them.

Gradient accumulation is Tunix's own (optax.MultiSteps); beta is 0, so there is no reference model; every other setting
of GRPOConfig has its default.
"""

import common

common.one_thread()  # before jax is imported

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402
from tunix.models.qwen2.model import ModelConfig, Qwen2  # noqa: E402
from tunix.rl import function_registry  # noqa: E402
from tunix.rl.grpo.grpo_learner import GRPOConfig, TrainExample  # noqa: E402
from tunix.rl.trainer import Trainer  # noqa: E402
from tunix.sft.peft_trainer import TrainingConfig  # noqa: E402

PAD = 0


def qwen2(tied: bool) -> Qwen2:
    """With random weights: Tunix initialises the feed-forward part with zeros."""
    config = ModelConfig(
        num_layers=common.LAYERS,
        vocab_size=common.VOCABULARY,
        embed_dim=common.HIDDEN,
        hidden_dim=common.FFN,
        num_heads=common.HEADS,
        head_dim=common.HEAD_DIM,
        num_kv_heads=common.KV_HEADS,
        rope_theta=common.ROPE_THETA,
        norm_eps=common.NORM_EPS,
        use_tied_embedding=tied,
    )
    model = Qwen2(config, rngs=nnx.Rngs(0))
    random = np.random.default_rng(0)

    def draw(x: jax.Array) -> jax.Array:
        return x if x.ndim == 1 else jnp.asarray(random.normal(0, common.INIT_STD, x.shape), x.dtype)

    nnx.update(model, jax.tree.map(draw, nnx.state(model, nnx.Param)))
    return model


def make_trainer(model: Qwen2, microbatches: int) -> Trainer:
    optimizer = optax.adamw(common.LEARNING_RATE, *common.BETAS, eps=common.ADAM_EPS, weight_decay=common.WEIGHT_DECAY)
    config = TrainingConfig(eval_every_n_steps=1, gradient_accumulation_steps=microbatches)
    trainer = Trainer(model, optimizer, config, custom_checkpoint_metadata_fn=dict)
    algorithm = GRPOConfig(beta=0.0)
    algorithm.temperature = 1.0  # as GRPOLearner takes it from the rollout's configuration
    policy_loss = function_registry.get_policy_loss_fn(algorithm.policy_loss_fn)

    def loss(model: Qwen2, train_example: TrainExample) -> tuple:
        return policy_loss(model, train_example, algo_config=algorithm, pad_id=PAD, eos_id=PAD)

    trainer.with_loss_fn(loss, has_aux=True)
    trainer.with_gen_model_input_fn(lambda example: {"train_example": example})
    return trainer


def microbatches(args) -> list[TrainExample]:
    """Random tokens, none of them padding."""
    tokens = np.random.default_rng(0).integers(1, common.VOCABULARY, (args.sequences, args.tokens), dtype=np.int32)
    advantages = np.asarray(common.advantages(args.sequences), np.float32)
    starts = range(0, args.sequences, args.microbatch)
    return [_example(tokens[i : i + args.microbatch], advantages[i : i + args.microbatch], args.prompt) for i in starts]


def _example(tokens: np.ndarray, advantages: np.ndarray, prompt: int) -> TrainExample:
    ids = jnp.asarray(tokens)
    return TrainExample(
        prompt_ids=ids[:, :prompt],
        prompt_mask=ids[:, :prompt] != PAD,
        completion_ids=ids[:, prompt:],
        completion_mask=ids[:, prompt:] != PAD,
        advantages=jnp.asarray(advantages),
        ref_per_token_logps=None,
        old_per_token_logps=None,
    )


def main() -> None:
    args = common.parser(__doc__).parse_args()
    clock = common.Clock(args)
    model = qwen2(not args.untied)
    examples = microbatches(args)
    trainer = make_trainer(model, len(examples))
    train_step, _ = trainer.jit_train_and_eval_step(cache_nnx_graph=True)  # as `Trainer.train` does
    for _ in range(clock.updates):
        clock.begin()
        for example in examples:
            out = train_step(example)
        jax.block_until_ready((out, nnx.state(model)))
        clock.end()
    parameters = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    clock.report("tunix", parameters, ["google-tunix", "jax", "flax"])


if __name__ == "__main__":
    main()
