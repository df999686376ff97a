"""The options of the commands, in groups. A field's name is the name of its flag; where TRL has the option, TRL's name.

The command line, YAML files and the `config.yaml` of a run are derived from these classes. `smd-train` and `smd-eval`
share the base classes `ModelSource`, `DataArgs`, `RewardArgs`, `EvaluationRows`, `SamplingArgs` and `ComputeArgs`.
Options marked `Basic` are on the first help page; `--help-all` shows all.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import tyro

from smd_jax.corrections.named import CORRECTIONS
from smd_jax.losses.named import LOSSES
from smd_jax.model.lora import TARGETS, Target
from smd_jax.runs.run_config import Objective

T = TypeVar("T")
BASIC = "basic"
Basic = Annotated[T, BASIC]
LR = tyro.conf.arg(aliases=["--lr"])

if TYPE_CHECKING:
    LossName = CorrectionName = str
else:  # one of the names in the table
    LossName, CorrectionName = map(tyro.extras.literal_type_from_choices, (LOSSES, CORRECTIONS))
AttentionName = Literal["auto", "portable"]
Distillation = Literal["none", "forward", "reverse", "published", "anchor", "ema"]

RETRY = "retry"  # value of --environment


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """The model, how its parameters are kept in memory, and its tokenizer."""

    model: Basic[str]  # Hugging Face checkpoint directory, or an id on the Hub
    model_revision: str | None = None  # branch, tag or commit on the Hub; None: the main branch
    tokenizer: str | None = None  # a directory, or an id on the Hub; None: the model's own
    tokenizer_revision: str | None = None  # branch, tag or commit of --tokenizer
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # compute dtype; auto: float32 on a CPU, else bfloat16
    # Dtype of the parameters in memory; bfloat16 needs less, and its stochastic rounding adds noise to small steps
    param_dtype: Literal["float32", "bfloat16"] = "float32"


@dataclass(frozen=True, kw_only=True)
class ModelArgs(ModelSource):
    """The model, and which of its parameters are trained."""

    gradient_checkpointing: Literal["none", "dots", "full"] = "full"  # parts that the backward pass recomputes
    scan_layers: bool = False  # loop over equal layers: compiles deep models faster; on CPUs it samples more slowly
    lora_r: Basic[int | None] = None  # rank of LoRA adapters; only these are trained then. None: no LoRA
    lora_alpha: float = 32.0  # adapters are scaled by alpha / rank
    lora_target_modules: tuple[Target, ...] = TARGETS  # projections of every layer that get adapters
    use_rslora: bool = False  # scale by alpha / sqrt(rank)


@dataclass(frozen=True, kw_only=True)
class DataArgs:
    """The prompts."""

    dataset: Basic[str]  # gsm8k, math, tldr, govreport, hotpotqa, countdown; reasoning_gym:NAME; Hub id, file or folder
    dataset_source: str | None = None  # rows in the layout of a dataset named above: a Hub id, file or folder
    dataset_config: str | None = None  # the subset, where a dataset has several
    split: Basic[str | None] = None  # such as test, train[:1000], train[90%:]; None: the dataset's default
    dataset_size: int = 10_000  # rows of a procedural dataset
    dataset_parameters: tuple[str, ...] = ()  # of a procedural dataset, such as min_terms=2
    prompt_column: Basic[str | None] = None  # text or chat messages; None: "prompt"
    # Message before every prompt, for models with a chat template. Text prompts and their completions then become chat
    # messages; smd.tasks.completion_text reads both
    system_prompt: str | None = None
    chat_template: Literal["auto", "none"] = "auto"  # auto: the tokenizer's, if there is one; none: plain text
    chat_template_kwargs: tuple[str, ...] = ()  # variables of the chat template, such as enable_thinking=false
    map_function: str | None = None  # path/to/file.py:function or package.module:function, row -> row
    max_prompt_length: int | None = None  # tokens; None: the length of the longest prompt


@dataclass(frozen=True, kw_only=True)
class RewardArgs:
    """The reward. Default: the dataset's own."""

    reward: Basic[tuple[str, ...]] = ()  # names in docs/rewards.md, or path/to/file.py:function with TRL's signature
    reward_weights: tuple[float, ...] = ()  # one for each reward; 1 by default
    reward_timeout: float | None = 60.0  # seconds for one call; None: no limit, called in the main process
    max_failed_rewards: float = 0.25  # largest share of completions without a reward; more stop the command
    overlong_cache: int | None = None  # tokens before the length limit over which `overlong` falls; None: a fifth


@dataclass(frozen=True, kw_only=True)
class EvaluationRows:
    """Evaluation: number of prompts, and ways of decoding."""

    eval_rows: int = 256  # maximum number of prompts
    eval_seed: int | None = None  # seed of a procedural dataset's rows, so that all runs share them; None: --seed
    # Ways of decoding: sampler, as in training; dense; or policy:budget[+buffer], as 'snapkv(window=16):512+128'
    eval_decode: Basic[tuple[str, ...]] = ("sampler", "dense")


@dataclass(frozen=True, kw_only=True)
class EvaluationArgs(EvaluationRows):
    """Evaluations before the run, every few rollouts, and at the end."""

    eval_steps: Basic[int] = 0  # rollouts between two evaluations; 0: never
    eval_dataset: Basic[str | None] = None  # None: the rows that the dataset holds back
    eval_source: str | None = None  # as --dataset-source
    eval_split: str | None = None  # as --split
    eval_temperature: float | None = None  # 0: greedy; None: --temperature
    metric_for_best_model: str | None = None  # keep the checkpoint with the best value, such as eval/dense/reward
    greater_is_better: bool | None = None  # whether that metric is maximised; None: unless its name ends in "loss"

    @property
    def objective(self) -> Objective | None:
        """The metric of the best checkpoint and its direction; None without one."""
        metric, greater = self.metric_for_best_model, self.greater_is_better
        if metric is None:
            return None
        return Objective(metric, maximize=not metric.endswith("loss") if greater is None else greater)


@dataclass(frozen=True, kw_only=True)
class SamplingArgs:
    """Sampling, and the KV cache of fixed size."""

    max_completion_length: Basic[int] = 256  # tokens
    min_completion_length: int = 0  # tokens
    temperature: Basic[float] = 1.0  # of the sampler; the learner uses the same
    top_k: int = 0  # sample from this many tokens; 0: from all
    top_p: float = 1.0  # sample from the most likely tokens that have this probability together
    min_p: float = 0.0  # sample from tokens at least this many times as likely as the most likely one
    stop: tuple[str, ...] = ()  # strings that end a completion and stay in it
    eos_token: tuple[str, ...] = ()  # tokens that end a completion; default: those of tokenizer and model
    # Which keys are evicted: snapkv, rkv, h2o, tova, keydiff, knorm, streaming_llm, recent, random; gate: a trained
    # one; dense: none. Parameters as 'snapkv(window=16)'; your own class or object as path/to/file.py:name
    eviction: Basic[str] = "snapkv"
    budget: Basic[int] = 512  # keys kept per layer and KV head
    buffer: Basic[int] = 128  # tokens between two compressions
    sinks: int = 4  # first keys that are always kept, also in --eval-decode; a trained gate keeps its own number
    pyramid: bool = False  # larger budgets in the lower layers, the same on average
    prefill_chunk: int | None = None  # prompt tokens read at once; None: all
    quant_bits: Literal[8, 4, 2] | None = None  # bits of a quantised KV cache; None: full precision


@dataclass(frozen=True, kw_only=True)
class SamplerArgs(SamplingArgs):
    """The rollout: its completions, and the KV cache of fixed size."""

    num_prompts: Basic[int] = 16  # prompts per rollout
    num_generations: Basic[int] = 8  # completions per prompt
    decode_rows: int | None = None  # completions decoded at once; None: all, or as many as fit into --memory


@dataclass(frozen=True, kw_only=True)
class ComputeArgs:
    """Devices."""

    platform: Literal["auto", "cpu", "gpu", "tpu"] = "auto"  # required platform; auto: any
    attention: AttentionName = "auto"  # auto: kernels on Hopper GPUs and TPUs; portable: plain JAX everywhere
    data_parallel: int = 1  # devices that split rows
    fsdp: int = 1  # devices that split rows and weights
    tensor: int = 1  # devices that split heads and the width of the MLP


@dataclass(frozen=True, kw_only=True)
class DeviceArgs(ComputeArgs):
    """Devices, and their memory. data-parallel * fsdp * tensor * sequence devices are used."""

    sequence: int = 1  # devices that split the columns of each row in the update, for very long rows
    memory: str | None = None  # limit per device, such as 80GiB: chooses sizes that fit; None: sizes as set
    microbatch: int | None = None  # rows of one pass (online-dpo: pairs); None: all, or as many as fit into --memory


@dataclass(frozen=True, kw_only=True)
class LossArgs:
    """The loss, and the correction for the difference between sampler and learner."""

    correction: Basic[CorrectionName] = "shadow"  # shadow: replay the evictions; all others train a dense learner
    dense_share: Basic[float] = 0.0  # share of the policy loss for a dense learner with TIS, truncated at 2
    distill: Distillation = "none"  # teacher of an additional distillation loss; anchor: the frozen start, dense
    distill_coef: float = 0.1  # weight of the distillation in the loss
    loss_type: Basic[LossName] = "grpo"  # with its paper's token weighting and bounds
    epsilon: float | None = None  # lower bound of the ratio's clipping; None: the paper's
    epsilon_high: float | None = None  # the upper bound minus 1 (TRL's cispo: the bound itself); None: the paper's
    entropy_coef: float = 0.0  # weight of the entropy bonus
    top_entropy_quantile: float = 1.0  # share of tokens to train on, those with the highest entropy
    minibatches: int = 1  # optimizer steps per pass over a rollout
    num_iterations: int = 1  # passes over a rollout
    mask_truncated_completions: bool = False  # leave out completions that a limit cut off
    pack_columns: int | None = None  # columns of an update row that sequences share; None: one row each, padded
    share_prompts: bool = False  # read a prompt once for all its completions in a microbatch


@dataclass(frozen=True, kw_only=True)
class ReferenceArgs:
    """The reference policy."""

    beta: Basic[float] = 0.0  # coefficient of the KL to the reference
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"  # how the KL is estimated from the sampled tokens
    kl_in_reward: bool = False  # subtract the KL from the rewards instead of adding it to the loss
    use_bias_correction_kl: bool = False  # multiply the estimate by the ratio; its gradient is then that of the KL
    sync_ref_model: bool = False  # move the reference towards the policy; it is frozen otherwise
    ref_model_mixup_alpha: float = 0.6  # share of the policy in the new reference
    ref_model_sync_steps: int = 512  # optimizer steps between two moves; 1 is an exponential moving average


@dataclass(frozen=True, kw_only=True)
class OptimizerArgs:
    """The optimizer, and its learning rate."""

    optim: Literal["adamw", "adafactor"] = "adamw"  # adafactor needs little memory in addition to the weights
    learning_rate: Basic[Annotated[float | None, LR]] = None  # maximum of the run; None: 1e-6, with LoRA 1e-5
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"  # schedule after the warm-up
    warmup_steps: float = 0.0  # optimizer steps; below 1: their share of the run
    min_lr_rate: float = 0.0  # end of linear and cosine, as a share of the learning rate
    weight_decay: float = 0.0  # of matrices; norms and biases do not decay
    adam_beta1: float = 0.9  # decay of AdamW's mean of gradients
    adam_beta2: float = 0.999  # decay of AdamW's mean of squared gradients
    adam_epsilon: float = 1e-8  # added to the root of that mean in AdamW's denominator
    momentum_dtype: Literal["float32", "bfloat16"] = "float32"  # dtype of AdamW's momentum
    max_grad_norm: float | None = 1.0  # gradients with a larger norm are scaled down to it; None: never
    gate_speed: float = 30.0  # learning rate of the gate of --eviction gate, relative to that of the model


@dataclass(frozen=True, kw_only=True)
class RunArgs:
    """The run: length, directory and reports."""

    output_dir: Basic[Path] = Path("runs/train")  # metrics, checkpoints, plots and the trained model
    max_steps: Basic[int] = 100  # rollouts
    save_steps: Basic[int] = 20  # rollouts between two checkpoints; 0: the last one only
    save_total_limit: int = 3  # newest checkpoints to keep; 1 needs the least disk
    mismatch_bound: float | None = None  # nats between sampler and learner that stop the run; None: by dtype and depth
    max_skipped_updates: int = 3  # rollouts in a row without a finite loss and gradient that stop the run
    resume: Basic[bool] = False  # continue from the newest checkpoint in output_dir
    resume_if_there: bool = False  # continue the run in output_dir, or begin one: for jobs that are restarted
    seed: Basic[int] = 0  # seed of prompts, completions, adapters and gates
    report_to: Basic[tuple[Literal["tensorboard", "wandb"], ...]] = ()  # loggers in addition to metrics.jsonl
    completions_steps: int = 20  # rollouts between two files of completions and masks, besides the last; 0: none
    print_completions: int = 0  # completions to show each time
    export_dtype: Literal["float32", "bfloat16"] = "float32"  # dtype of the trained weights; bfloat16 loses small steps
    dry_run: Basic[bool] = False  # print the plan, the mesh and the first prompts, then exit


@dataclass(frozen=True, kw_only=True)
class LaunchArgs:
    """Several processes that train one model. All get the same command, except for --process-id."""

    coordinator: str | None = None  # host:port of process 0; auto: TPU pods, SLURM, GKE, Open MPI; None: one process
    num_processes: int | None = None  # number of processes
    process_id: int | None = None  # index of this process, from 0


@dataclass(frozen=True, kw_only=True)
class GroupArgs:
    """Comparison of the completions of a prompt."""

    # Divide advantages by the standard deviation of rewards in the group or in the batch, or not at all
    scale_rewards: Literal["group", "batch", "none"] = "group"
    dynamic_sampling: int | None = None  # maximum extra rollouts that replace groups without signal; 0: only drop these


@dataclass(frozen=True, kw_only=True)
class ConversationArgs:
    """Conversations with an environment, instead of single completions."""

    # path/to/file.py:Class or package.module:Class, one object per conversation; retry: several attempts at a row of
    # the dataset, graded by its own reward; None: single completions. --max-completion-length counts all tokens
    # after the prompt
    environment: Basic[str | None] = None
    max_turns: int = 8  # maximum turns of the policy
    max_turn_length: int | None = None  # tokens of a turn; None: as many as there is room for
    environment_timeout: float | None = 60.0  # seconds for one call; None: no limit, called in the main process
    contexts: int = 1  # maximum per conversation; a full one is summarised, and the next begins with the summary
    context_length: int | None = None  # tokens after the prompt from which a context is full; needed with --contexts
    summary_request: str | None = None  # text that asks the policy for a summary; None: a default
    summary_heading: str = ""  # text between prompt and summary in the next context


@dataclass(frozen=True, kw_only=True)
class EnvironmentArgs(ConversationArgs):
    """Conversations with an environment, instead of single completions."""

    turn_credit: Literal["trajectory", "turn"] = "trajectory"  # turn: one advantage per turn


@dataclass(frozen=True, kw_only=True)
class AheadArgs:
    """Rollouts in parallel with the update."""

    rollouts_ahead: Literal[0, 1] = 0  # 1: sample the next rollout during the update; one device, shadow masks


@dataclass(frozen=True, kw_only=True)
class CriticArgs:
    """The critic."""

    gamma: float = 1.0  # discount of rewards per token
    lam: float = 0.95  # lambda of generalised advantage estimation (arXiv:1506.02438)
    whiten_advantages: bool = True  # to mean 0 and variance 1 over the tokens of a rollout


@dataclass(frozen=True, kw_only=True)
class PairArgs:
    """The loss of pairs."""

    dpo_beta: float = 0.1  # strength of the pull towards the reference
    dpo_loss: Literal["sigmoid", "ipo"] = "sigmoid"  # ipo: arXiv:2310.12036
    missing_eos_penalty: float | None = None  # subtracted from the reward of completions that were cut off


@dataclass(frozen=True, kw_only=True)
class Common:
    """The options of all algorithms."""

    model: ModelArgs
    data: DataArgs
    rewards: RewardArgs = RewardArgs()
    evaluation: EvaluationArgs = EvaluationArgs()
    conversations: EnvironmentArgs = EnvironmentArgs()
    sampler: SamplerArgs = SamplerArgs()
    optimizer: OptimizerArgs = OptimizerArgs()
    run: RunArgs = RunArgs()
    device: DeviceArgs = DeviceArgs()
    launch: LaunchArgs = LaunchArgs()


@dataclass(frozen=True, kw_only=True)
class Grpo(Common):
    """Group relative policy optimisation (arXiv:2402.03300), and its relatives by --loss-type."""

    loss: LossArgs = LossArgs()
    reference: ReferenceArgs = ReferenceArgs()
    group: GroupArgs = GroupArgs()
    ahead: AheadArgs = AheadArgs()


@dataclass(frozen=True, kw_only=True)
class Rloo(Common):
    """REINFORCE with the mean of the other completions as baseline (arXiv:2402.14740)."""

    loss: LossArgs = LossArgs()
    reference: ReferenceArgs = ReferenceArgs()
    ahead: AheadArgs = AheadArgs()


@dataclass(frozen=True, kw_only=True)
class Ppo(Common):
    """Proximal policy optimisation with a critic (arXiv:1707.06347)."""

    loss: LossArgs = LossArgs()
    reference: ReferenceArgs = ReferenceArgs()
    critic: CriticArgs = CriticArgs()


@dataclass(frozen=True, kw_only=True)
class OnlineDpo(Common):
    """Direct preference optimisation on pairs from the policy itself (arXiv:2402.04792)."""

    pairs: PairArgs = PairArgs()
