"""What `smd-train` can be told, in groups; the name of a field is the name of its flag, TRL's where TRL has one.

A flag says here what it does, its type and its default, and nowhere else: the command line, the YAML file and the
configuration that is kept beside a run are all made from these classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

LossName = Literal["grpo", "bnpo", "dapo", "dr_grpo", "gspo", "cispo", "sapo", "luspo"]
CorrectionName = Literal[
    "shadow", "naive", "bypass", "tis", "mis", "icepop", "sparse_rl", "qurl", "geometric_rejection", "dppo_tv"
]
AttentionName = Literal["auto", "portable"]
TemplateName = Literal["auto", "none"]
LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ALL_TARGETS: tuple[LoraTarget, ...] = get_args(LoraTarget)
Distillation = Literal["auto", "none", "forward", "reverse", "published", "anchor", "ema"]


@dataclass(frozen=True)
class ModelArgs:
    """The model, how its numbers are stored, and what of it is trained."""

    model: str  # Hugging Face checkpoint directory, or an id on the Hub
    model_revision: str | None = None  # branch, tag or commit of a model on the Hub; None: its main branch
    tokenizer: str | None = None  # a directory, or an id on the Hub; None: the model's own
    tokenizer_revision: str | None = None  # the same of --tokenizer
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # compute dtype; auto: float32 on a CPU, else bfloat16
    param_dtype: Literal["float32", "bfloat16"] = "float32"  # of the stored parameters; bfloat16 loses small steps
    gradient_checkpointing: Literal["none", "dots", "full"] = "full"  # what the backward pass computes again
    lora_r: int | None = None  # rank of adapters, which alone are trained; None: everything is
    lora_alpha: float = 32.0  # what adapters add is scaled by alpha / rank
    lora_target_modules: tuple[LoraTarget, ...] = ALL_TARGETS  # projections of every layer that have adapters
    use_rslora: bool = False  # scale by alpha / sqrt(rank)


@dataclass(frozen=True)
class DataArgs:
    """Where prompts come from, and what is left out."""

    dataset: str  # gsm8k, math, tldr, govreport, hotpotqa, countdown; reasoning_gym:NAME; a Hub id, file or folder
    dataset_source: str | None = None  # with one of the names above: other rows in its layout, a Hub id, file or folder
    dataset_config: str | None = None  # which of several configurations (subsets)
    dataset_split: str | None = None  # such as train, train[:1000], train[90%:]
    dataset_streaming: bool = False  # read rows one after the other, not all of them before the start
    dataset_size: int = 10_000  # rows of a procedural dataset
    dataset_parameters: tuple[str, ...] = ()  # of a procedural dataset, as min_terms=2
    prompt_column: str | None = None  # text or chat messages; None: "prompt"
    # In front of every prompt, for models with a chat template. It makes chat messages of text prompts, and so of the
    # completions that rewards get: smd.tasks.completion_text takes either
    system_prompt: str | None = None
    chat_template: TemplateName = "auto"  # none: prompts are text, taken as it is; auto: a template is used if there
    chat_template_kwargs: tuple[str, ...] = ()  # what the chat template is told, as enable_thinking=false
    map_function: str | None = None  # path/to/file.py:function or package.module:function, row -> row
    max_prompt_length: int | None = None  # tokens; None: those of the longest prompt
    long_prompts: Literal["drop", "refuse"] = "drop"  # what happens to longer ones


@dataclass(frozen=True)
class RewardArgs:
    """What is rewarded. Without --reward it is what the dataset brings along."""

    reward: tuple[str, ...] = ()  # names of docs/rewards.md, or path/to/file.py:function; TRL's signature
    reward_weights: tuple[float, ...] = ()  # one for each; 1 by default
    reward_timeout: float | None = 60.0  # seconds of one call until it has failed; None: no limit, no own process
    max_failed_rewards: float = 0.25  # share of a rollout's completions without a reward that stops the run
    overlong_cache: int | None = None  # tokens before the limit over which `overlong` rises; None: a fifth of it


@dataclass(frozen=True)
class EvaluationArgs:
    """Evaluations before the run, every few rollouts, and at its end."""

    eval_steps: int = 0  # rollouts between two evaluations; 0: none at all
    eval_rows: int = 256  # prompts, at most
    eval_dataset: str | None = None  # None: the rows that the dataset holds back
    eval_source: str | None = None  # as --dataset-source
    eval_split: str | None = None  # as --dataset-split
    eval_seed: int | None = None  # of a procedural dataset's rows, so that runs of all seeds share them; None: --seed
    # Ways of decoding: sampler, as in training; dense; or policy:budget[+buffer], as 'snapkv(window=16):512+128'
    eval_decode: tuple[str, ...] = ("sampler", "dense")
    eval_temperature: float | None = None  # 0: greedy; None: the sampler's
    metric_for_best_model: str | None = None  # a metric such as eval/dense/reward, whose best checkpoint is kept
    early_stopping_patience: int | None = None  # evaluations without a gain of that metric after which the run ends


@dataclass(frozen=True)
class SamplerArgs:
    """The rollout: its completions, and the KV cache of fixed size."""

    num_prompts: int = 16  # prompts of one rollout
    num_generations: int = 8  # completions per prompt
    max_completion_length: int = 256  # tokens
    min_completion_length: int = 0  # tokens
    temperature: float = 1.0  # of the sampler; the learner's log-probabilities are those at this temperature
    top_k: int = 0  # draw from so many tokens; 0: from all. The learner replays this filter, and the two below
    top_p: float = 1.0  # draw from the likeliest tokens that have this probability together
    min_p: float = 0.0  # draw from tokens at least this many times as likely as the likeliest
    stop: tuple[str, ...] = ()  # texts that end a completion, and stay in it
    eos_token: tuple[str, ...] = ()  # tokens that end one; by default those of tokenizer and generation_config.json
    # Which keys the cache drops: snapkv, rkv, h2o, tova, keydiff, knorm, streaming_llm, recent, random; gate: reward
    # trains which; dense keeps all. With parameters as 'snapkv(window=16)'; your own class as path/to/file.py:Class
    eviction: str = "snapkv"
    budget: int = 512  # keys kept per layer and KV head
    buffer: int = 128  # tokens between two compressions
    sinks: int = 4  # first keys that are always kept, as models look at them for want of others; in --eval-decode, too
    pyramid: bool = False  # larger budgets in the lower layers, the same on average
    prefill_chunk: int | None = None  # tokens of a prompt read at once; None: all
    quant_bits: Literal[8, 4, 2] | None = None  # of the cache's codes; None: full precision
    decode_rows: int | None = None  # completions decoded at once, others move up; None: as many as fit


@dataclass(frozen=True)
class LossArgs:
    """The loss, and what is done about the difference between sampler and learner."""

    correction: CorrectionName = "shadow"  # shadow: replay what the sampler saw; the others correct a dense learner
    dense_share: float = 0.0  # of the policy loss, for a dense TIS learner; the shadow masks' learner has the rest
    distill: Distillation = "auto"  # auto: anchor, a frozen dense teacher, where shadow masks hide any key, else none
    distill_coef: float = 0.1  # weight of the distillation in the loss
    distill_fraction: float = 1.0  # share of the rows that the teacher reads
    loss_type: LossName = "grpo"  # with its paper's weighting of tokens and bounds
    epsilon: float | None = None  # lower bound of the ratio's clipping; None: the paper's
    epsilon_high: float | None = None  # upper bound, over 1 (TRL's cispo takes the bound itself); None: the paper's
    entropy_coef: float = 0.0  # weight of the entropy bonus
    top_entropy_quantile: float = 1.0  # share of the tokens, those with the highest entropy, that are learnt from
    minibatches: int = 1  # optimizer steps per pass over a rollout
    num_iterations: int = 1  # passes over a rollout
    mask_truncated_completions: bool = False  # leave out completions that the length limit cut off


@dataclass(frozen=True)
class ReferenceArgs:
    """The reference policy."""

    beta: float = 0.0  # coefficient of the KL to it
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"  # how the KL is estimated from the tokens that were drawn
    kl_in_reward: bool = False  # take the KL off the rewards, not into the loss
    use_bias_correction_kl: bool = False  # multiply the estimate by the ratio, whose gradient is then that of the KL
    sync_ref_model: bool = False  # let the reference follow the policy; it is frozen otherwise
    ref_model_mixup_alpha: float = 0.6  # share of the policy in the new reference
    ref_model_sync_steps: int = 512  # optimizer steps between two of them; 1 is an exponential moving average


@dataclass(frozen=True)
class OptimizerArgs:
    """The optimizer, and its learning rate."""

    optim: Literal["adamw", "adafactor"] = "adamw"  # adafactor needs the memory of the weights alone
    learning_rate: float | None = None  # the highest of the run; None: 1e-6, with adapters 1e-5
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"  # what follows the warm-up
    warmup_steps: float = 0.0  # optimizer steps; below 1: their share of the run
    min_lr_rate: float = 0.0  # where linear and cosine end, as a share of the learning rate
    weight_decay: float = 0.0  # of matrices; norms and biases do not decay
    adam_beta1: float = 0.9  # decay of AdamW's mean of gradients
    adam_beta2: float = 0.999  # decay of its mean of their squares
    adam_epsilon: float = 1e-8  # what it adds to the root of the latter
    momentum_dtype: Literal["float32", "bfloat16"] = "float32"  # of AdamW
    max_grad_norm: float = 1.0  # longer gradients are scaled down to it
    gate_speed: float = 30.0  # learning rate of the gate of --eviction gate over that of the model


@dataclass(frozen=True)
class RunArgs:
    """The run: how long, where it is kept, what it says."""

    output_dir: Path = Path("runs/train")  # metrics, checkpoints, plots and the trained model
    max_steps: int = 100  # rollouts
    save_steps: int = 20  # rollouts between two checkpoints; 0: the last one only
    save_total_limit: int = 3  # newest checkpoints that are kept
    mismatch_bound: float | None = None  # nats between sampler and learner that stop it; None: by dtype and depth
    max_skipped_updates: int = 3  # rollouts in a row without a finite loss and gradient that stop it
    resume: bool = False  # go on from the newest checkpoint in output_dir
    resume_if_there: bool = False  # go on where output_dir has a run, else begin one: for jobs that are started again
    seed: int = 0  # of prompts, completions, adapters and gates
    report_to: tuple[Literal["tensorboard", "wandb"], ...] = ()  # beside metrics.jsonl
    wandb_project: str | None = None  # None: what the variable WANDB_PROJECT says, or else smd_jax
    wandb_mode: Literal["online", "offline"] = "online"  # offline: keep what is to be sent in the output directory
    completions_steps: int = 20  # rollouts between two files of completions and masks, besides the last; 0: none
    print_completions: int = 0  # completions that are shown each time
    export_dtype: Literal["float32", "bfloat16"] = "float32"  # of the trained model; bfloat16 loses small steps
    dry_run: bool = False  # print the plan, the mesh and the first prompts, and leave
    debug: bool = False  # show the traceback of every error


@dataclass(frozen=True)
class DeviceArgs:
    """Devices, and what they hold."""

    platform: Literal["auto", "cpu", "gpu", "tpu"] = "auto"  # refuse to start on another one
    memory: str | None = None  # of a device that the run may take, as 80GiB; None: all, of a CPU 0.8 of the machine's
    attention: AttentionName = "auto"  # auto: kernels on Hopper GPUs and TPUs; portable: plain JAX everywhere
    microbatch: int | None = None  # rows of one forward and backward pass; None: as many as fit
    pack_columns: int | None = None  # of a row of the update that sequences share; None: a row each, and padding
    share_prompts: bool = False  # the update reads a prompt once for its completions, as many as a microbatch has
    data_parallel: int = 1  # devices among which rows are split; times fsdp, tensor, sequence: all that are used
    fsdp: int = 1  # devices among which rows and weights are split
    tensor: int = 1  # devices among which heads and the width of the MLP are split
    sequence: int = 1  # devices among which the columns of each row are split in the update, for very long rows


@dataclass(frozen=True)
class LaunchArgs:
    """Several processes that train one model: the same command in all of them, but for --process-id."""

    coordinator: str | None = None  # host:port of process 0; auto: TPU pods, SLURM, GKE, Open MPI; None: one process
    num_processes: int | None = None  # how many there are
    process_id: int | None = None  # which one this is, from 0


@dataclass(frozen=True)
class GroupArgs:
    """How the completions of a prompt are compared."""

    scale_rewards: Literal["group", "batch", "none"] = "group"  # whose standard deviation divides advantages
    dynamic_sampling: int | None = None  # most further rollouts that replace groups without signal; 0: drop these


@dataclass(frozen=True)
class AheadArgs:
    """What goes on beside the update."""

    rollouts_ahead: Literal[0, 1] = 0  # 1: the next rollout is drawn beside the update; one process, shadow masks


@dataclass(frozen=True)
class CriticArgs:
    """The critic."""

    gamma: float = 1.0  # discount of rewards, a token
    lam: float = 0.95  # lambda of generalised advantage estimation (arXiv:1506.02438)
    whiten_advantages: bool = True  # to mean 0 and variance 1 over the tokens of a rollout


@dataclass(frozen=True)
class PairArgs:
    """The loss of pairs."""

    dpo_beta: float = 0.1  # how far the policy may move from the reference
    dpo_loss: Literal["sigmoid", "ipo"] = "sigmoid"  # ipo: arXiv:2310.12036
    missing_eos_penalty: float | None = None  # taken off the reward of completions that were cut off


@dataclass(frozen=True)
class Common:
    """What all algorithms can be told."""

    model: ModelArgs
    data: DataArgs
    rewards: RewardArgs = RewardArgs()
    evaluation: EvaluationArgs = EvaluationArgs()
    sampler: SamplerArgs = SamplerArgs()
    optimizer: OptimizerArgs = OptimizerArgs()
    run: RunArgs = RunArgs()
    device: DeviceArgs = DeviceArgs()
    launch: LaunchArgs = LaunchArgs()


@dataclass(frozen=True)
class Grpo(Common):
    """Group relative policy optimisation (arXiv:2402.03300), and its relatives by --loss-type."""

    loss: LossArgs = LossArgs()
    reference: ReferenceArgs = ReferenceArgs()
    group: GroupArgs = GroupArgs()
    ahead: AheadArgs = AheadArgs()


@dataclass(frozen=True)
class Rloo(Common):
    """REINFORCE with the mean of the other completions as baseline (arXiv:2402.14740)."""

    loss: LossArgs = LossArgs()
    reference: ReferenceArgs = ReferenceArgs()
    ahead: AheadArgs = AheadArgs()


@dataclass(frozen=True)
class Ppo(Common):
    """Proximal policy optimisation with a critic (arXiv:1707.06347)."""

    loss: LossArgs = LossArgs()
    reference: ReferenceArgs = ReferenceArgs()
    critic: CriticArgs = CriticArgs()


@dataclass(frozen=True)
class OnlineDpo(Common):
    """Direct preference optimisation on pairs from the policy itself (arXiv:2402.04792)."""

    pairs: PairArgs = PairArgs()
