"""Runs whose results are compared between one process on several devices and several processes on one device each.

python -m tests.joined FOLDER COORDINATOR COUNT INDEX       the process with index 0 writes FOLDER/COUNT.npz
"""

import dataclasses
import functools
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from smd_jax.commands import launch, prepare, train
from smd_jax.commands.arguments import LaunchArgs
from smd_jax.commands.errors import UserError
from smd_jax.config import Experts
from smd_jax.devices import processes
from smd_jax.devices.process_rows import check_prompts_divide, data_shards
from smd_jax.devices.processes import OtherProcessError, on_host
from smd_jax.devices.sharding import make_mesh, shard_tree
from smd_jax.eviction.policies import H2O
from smd_jax.learner.auxiliary_terms import BalanceTerm
from smd_jax.learner.config import UpdateConfig
from smd_jax.learner.mismatch_guard import MismatchGuard
from smd_jax.learner.state import TrainState, init_state
from smd_jax.losses.distillation import DistillConfig
from smd_jax.losses.policy import LossConfig
from smd_jax.losses.value import ValueConfig
from smd_jax.message.masks import NEVER
from smd_jax.model import layer_runs
from smd_jax.model.decoder import Decoder
from smd_jax.model.lora import LoraConfig, add_lora
from smd_jax.model.stacked_params import stack_params
from smd_jax.model.value_head import add_value_head
from smd_jax.runs import checkpoint, run
from smd_jax.runs.checkpoint import reading, writing
from smd_jax.runs.run_config import RunConfig
from smd_jax.sampler.fixed_batch import RolloutConfig
from smd_jax.tasks.rewards import Rewards, RewardWarning, TooManyFailures
from smd_jax.tasks.task import batch_indices
from smd_jax.testing import byte_tokenizer, random_params, tiny_model_config
from smd_jax.train import loop as loop_module
from smd_jax.train.evaluation import Decode, EvaluationConfig, Evaluator
from smd_jax.train.grpo import GRPOConfig, GRPOLoop
from smd_jax.train.loop import Loop
from smd_jax.train.online_dpo import OnlineDPOConfig, OnlineDPOLoop
from smd_jax.train.ppo import PPOConfig, PPOLoop
from smd_jax.train.samples import RefusedRolloutError, Samples
from tests.documented_metrics import MACHINE_METRICS

EOS, PAD = 258, 256
TOKENIZER = byte_tokenizer(chat=False)
MODEL = Decoder(tiny_model_config(max_positions=32, num_layers=1))
# The fewest layers that are looped over. Their stacked parameters are sharded over both devices.
LOOPED = Decoder(dataclasses.replace(MODEL.config, num_layers=layer_runs.LEAST), scan_layers=True)
ROLLOUT = RolloutConfig(max_new_tokens=6, budget=5, buffer=2, eos_token_id=EOS, pad_token_id=PAD)
SIZES: Any = {"prompts_per_step": 4, "group_size": 2, "prompt_width": 8, "policy": H2O(), "rollout": ROLLOUT}
CONFIG = GRPOConfig(**SIZES)
STEPS = 2


@dataclasses.dataclass(frozen=True)
class Words:
    """Prompts of several lengths."""

    prompts: int = 12

    def __len__(self) -> int:
        return self.prompts

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"prompt": "abcdefgh"[: 1 + index % 8], "number": index}

    def reward(self, prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
        """Depends on the token ids, so that completions of a random model differ in reward."""
        return [(sum(ids) % 11) / 10 for ids in completion_ids]


@functools.cache
def optimizer() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))


def steps_of(loop: Loop, params: Any, steps: int = STEPS, reference: Any = None) -> dict[str, np.ndarray]:
    """Runs the steps; returns tokens, rewards, metrics and parameters by name."""
    results = dict[str, np.ndarray]()

    def watch(index: int, samples: Samples) -> None:
        trajectory = samples.trajectory
        for name, x in (("tokens", trajectory.tokens), ("logprobs", trajectory.logprobs), ("rewards", samples.rewards)):
            results[f"{name} {index}"] = np.asarray(x)
        for place, x in enumerate(jax.tree.leaves(trajectory.mask)):
            results[f"mask {index} {place}"] = np.asarray(x)
        if trajectory.routing is not None:
            results[f"routing {index}"] = np.asarray(trajectory.routing)
        results[f"completions {index}"] = np.array(samples.completions)
        results[f"numbers {index}"] = np.array([row["number"] for row in samples.task_rows])

    loop = dataclasses.replace(loop, watch=watch)
    state = init_state(shard_tree(params, loop.mesh), loop.optimizer, jax.random.key(3), reference)
    for step in range(steps):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RewardWarning)
            state, metrics = loop.step(state)
        results |= {
            f"metric {step} {name}": np.asarray(x, np.float64)
            for name, x in metrics.items()
            if name not in MACHINE_METRICS
        }
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.params):
        results[f"params {jax.tree_util.keystr(path)}"] = on_host(leaf)
    return results


def params() -> Any:
    return random_params(MODEL.config)


def stacked_params() -> Any:
    return stack_params(random_params(LOOPED.config), LOOPED.shape.layer_runs)


def mesh() -> Mesh:
    """Two devices: a sum of two is the same in either order, so that bits can be compared."""
    return make_mesh(1, 2, 1)


def rewards() -> Rewards:
    return Rewards((Words().reward,), seconds=None)


def taught() -> dict[str, np.ndarray]:
    """GRPO with a frozen dense teacher (the default of smd-train), many evictions and dynamic sampling. The reward is 1
    for an odd first token, so that some groups have no signal."""
    update = UpdateConfig(distill=DistillConfig(direction="anchor", coef=0.1))
    rollout = dataclasses.replace(ROLLOUT, max_new_tokens=20)
    config = dataclasses.replace(CONFIG, rollout=rollout, update=update, dynamic_sampling=1)
    parity = Rewards((first_is_odd,), seconds=None)
    loop = GRPOLoop(MODEL, Words(), TOKENIZER, optimizer(), config, mesh(), rewards=parity)
    return steps_of(loop, params(), reference=params())


def first_is_odd(completion_ids: Any, **columns: Any) -> list[float]:
    return [float(ids[0] % 2) for ids in completion_ids]


def ppo_with_adapters() -> dict[str, np.ndarray]:
    """PPO with half of the completions decoded at a time, two minibatches, two passes, and a KL penalty in the rewards
    to the base model without adapters."""
    update = UpdateConfig(value=ValueConfig(), loss=LossConfig(beta=0.1, kl_estimator="k1"), kl_in_reward=True)
    config = PPOConfig(**SIZES, decode_rows=4, prefill_rows=4, minibatches=2, num_iterations=2, update=update)
    loop = PPOLoop(MODEL, Words(), TOKENIZER, optimizer(), config, mesh(), rewards=rewards())
    return steps_of(
        loop, add_value_head(add_lora(params(), LoraConfig(rank=2), jax.random.key(5)), MODEL.config), steps=1
    )


def pairs() -> dict[str, np.ndarray]:
    """Online DPO with a loop over layers, and completions without a reward."""
    config = OnlineDPOConfig(**SIZES)
    loop = OnlineDPOLoop(LOOPED, Words(), TOKENIZER, optimizer(), config, mesh(), rewards=all_but_one_prompt())
    return steps_of(loop, stacked_params(), steps=1, reference=stacked_params())


def all_but_one_prompt() -> Rewards:
    """Completions of the last prompt of the first rollout have no reward: half of one process's, but within the limit
    of the whole rollout."""
    last = batch_indices(len(Words()), CONFIG.prompts_per_step, 0, CONFIG.seed)[CONFIG.prompts_per_step - 1]

    def reward(number: Any, completion_ids: Any, **columns: Any) -> list[float | None]:
        return [None if row == last else sum(ids) / 100 for row, ids in zip(number, completion_ids, strict=True)]

    return Rewards((reward,), seconds=None)


def rewards_of_first_process(number: Any, completion_ids: Any, **columns: Any) -> list[float | None]:
    known = batch_indices(len(Words()), CONFIG.prompts_per_step, 0, CONFIG.seed)[: CONFIG.prompts_per_step // 2]
    return [sum(ids) / 100 if row in known else None for row, ids in zip(number, completion_ids, strict=True)]


def experts(over: Mesh) -> dict[str, np.ndarray]:
    """A mixture of experts, with adapters on attention and experts, the load-balancing loss, and completions without a
    reward."""
    mixture = Experts(count=4, per_token=2, intermediate_size=24, balance_coef=0.01)
    config = dataclasses.replace(MODEL.config, experts=mixture)
    update = UpdateConfig(terms=(BalanceTerm(mixture.count, mixture.balance_coef),))
    adapted = add_lora(random_params(config), LoraConfig(rank=2), jax.random.key(5))
    loop_config = dataclasses.replace(CONFIG, update=update)
    loop = GRPOLoop(Decoder(config), Words(), TOKENIZER, optimizer(), loop_config, over, rewards=all_but_one_prompt())
    return steps_of(loop, adapted)


def experts_over_processes() -> dict[str, np.ndarray]:
    """Each device has two of the four experts."""
    return experts(make_mesh(1, 1, 2))


def on_four_devices() -> dict[str, np.ndarray]:
    """Each device has one prompt and all experts."""
    return experts(make_mesh(1, 4, 1))


RUNS = {take.__name__: take for take in (taught, ppo_with_adapters, pairs, experts_over_processes)}


WRONG_ROW, WRONG_LAYER, WRONG_HEAD = 6, 1, 0


class OneRowWrong(GRPOLoop):
    """Records the evictions of one head one query late, in a row that the last process sampled."""

    def collect(self, state: TrainState, index: int) -> Samples:
        samples = super().collect(state, index)
        mask = samples.trajectory.mask
        wrong = mask.replace(evicted_at=one_query_late(mask.evicted_at), segments=())
        return samples._replace(trajectory=samples.trajectory.replace(mask=wrong))


@jax.jit
def one_query_late(evicted_at: jax.Array) -> jax.Array:
    own = evicted_at[WRONG_ROW, WRONG_LAYER, WRONG_HEAD]
    return evicted_at.at[WRONG_ROW, WRONG_LAYER, WRONG_HEAD].add((own > 0) & (own < NEVER))


def refused_rollout(folder: Path) -> dict[str, np.ndarray]:
    """Errors of all processes at a mismatch in one row of the last process, and if process 0 has no disk space to dump
    that rollout. The runs are in folders of these names."""
    loop = OneRowWrong(LOOPED, Words(), TOKENIZER, optimizer(), CONFIG, mesh(), rewards=rewards())
    full = mock.patch("smd_jax.disk.save_file", side_effect=OSError("No space left on device"))
    messages = dict[str, np.ndarray]()
    for name, disk in (("refused", nullcontext()), ("no_room", full if processes.is_first() else nullcontext())):
        state = init_state(shard_tree(stacked_params(), loop.mesh), loop.optimizer, jax.random.key(3))
        try:
            with disk:
                run.train(loop, state, RunConfig(steps=2), folder / name)
        except (RefusedRolloutError, OtherProcessError, OSError) as error:
            messages[f"{name}: said"] = np.array(processes.gather_json(f"{type(error).__name__}: {error}"))
    return messages


def refusals(index: int, folder: Path, out: Path) -> dict[str, np.ndarray]:
    """Errors of all processes if one of them has another configuration or fails."""
    messages = dict[str, np.ndarray]()
    for name, body in (
        ("only one resumes", lambda: command(folder, out, "--debug", *["--resume"][index:])),
        ("one that resumes fails", lambda: _resumes_without_rows(index, folder, out)),
        ("other checkpoints", lambda: _trains_with_fewer_checkpoints(index, out)),
        ("other bound", lambda: _resumes_under(MismatchGuard(0.25 * (1 + index)), out)),
        ("other seed", lambda: processes.check_same({"run": {"seed": index, "steps": 4}})),
        ("other evaluation", lambda: launch.check_same_plan(CONFIG, _evaluator(rows=4 * (1 + index)))),
        ("other held-out rows", lambda: launch.check_same_plan(CONFIG, _evaluator(prompts=12 - index))),
        ("other version", lambda: _with_version(f"0.{index}.0")),
        ("failure", lambda: _fails_in_last(index)),
        ("mesh", lambda: make_mesh(1)),
        ("prompts", lambda: check_prompts_divide(3, data_shards(mesh()))),
        ("failed rewards", _without_rewards),
        ("failed rewards of an evaluation", _evaluates_without_rewards),
        ("no room for checksums", lambda: _raise_all_errors(lambda: _saves_without_checksums(out.parent / "full"))),
        ("unseen file", lambda: _raise_all_errors(lambda: _sees_fewer_files(out.parent / "unseen"))),
        ("part that cannot be read", lambda: _raise_all_errors(lambda: _reads_truncated_part(out.parent / "unseen"))),
        ("data that cannot be read", lambda: _raise_all_errors(lambda: _samples_without_rows(index))),
    ):
        try:
            body()
        except (OtherProcessError, UserError, ValueError, KeyError, TooManyFailures) as error:
            messages[f"refused: {name}"] = np.array(str(error))
    return messages


def _evaluator(rows: int = 4, prompts: int = 12) -> Evaluator:
    """An evaluation whose sizes may differ between hosts."""
    config = EvaluationConfig(
        decodes=(Decode("h2o", H2O()),), rollout=ROLLOUT, prompt_width=CONFIG.prompt_width, rows=rows
    )
    return Evaluator(MODEL, Words(prompts), TOKENIZER, config, mesh())


def _with_version(version: str) -> None:
    with mock.patch.object(processes, "versions", lambda: {"jax": version}):
        processes.check_same({})


def _resumes_without_rows(index: int, folder: Path, out: Path) -> None:
    """The other processes get as far as resuming the checkpoint."""
    broken = mock.patch.object(train, "prepare", side_effect=OSError("expected rows on this host; got none"))
    with broken if index else nullcontext():
        command(folder, out, "--debug", "--resume", "--max-steps", "3")


def _trains_with_fewer_checkpoints(index: int, out: Path) -> None:
    fewer = mock.patch.object(run, "all_steps", return_value=[])
    with fewer if index else nullcontext():
        _resumes_under(MismatchGuard(), out)


def _resumes_under(guard: MismatchGuard, out: Path) -> None:
    loop = GRPOLoop(MODEL, Words(), TOKENIZER, optimizer(), CONFIG, mesh(), rewards=rewards(), guard=guard)
    run.train(
        loop, init_state(params(), optimizer(), jax.random.key(3)), RunConfig(steps=3), out, config=1, resume=True
    )


def _without_rewards() -> None:
    few = Rewards((rewards_of_first_process,), seconds=None)
    loop = GRPOLoop(LOOPED, Words(), TOKENIZER, optimizer(), CONFIG, mesh(), rewards=few)
    steps_of(loop, stacked_params(), steps=1)


def _evaluates_without_rewards() -> None:
    few = Rewards((rewards_of_first_process,), seconds=None)
    config = EvaluationConfig(decodes=(Decode("sampler", H2O()),), rollout=ROLLOUT, prompt_width=8, rows=12)
    Evaluator(MODEL, Words(), TOKENIZER, config, mesh(), rewards=few).run(params())


def _raise_all_errors(body: Callable[[], None]) -> None:
    try:
        body()
    except (OtherProcessError, RuntimeError, OSError) as error:
        raise ValueError(" | ".join(processes.gather_json(f"{type(error).__name__}: {error}"))) from error


def _saves_without_checksums(place: Path) -> None:
    full = mock.patch.object(writing, "write_checksums", side_effect=OSError(28, "No space left on device"))
    with full if processes.is_first() else nullcontext(), checkpoint.Writer(place) as writer:
        writer.save(1, shard_tree(params(), mesh()), config=1)


def _sees_fewer_files(place: Path) -> None:
    """The last process does not see a file of the newest checkpoint, which is complete."""
    state = shard_tree(params(), mesh())
    with checkpoint.Writer(place) as writer:
        for step in (1, 2):
            writer.save(step, state, config=1)
    hidden = mock.patch.object(reading, "check_files", side_effect=ValueError("1 of 9 files are damaged: state/d/1"))
    with nullcontext() if processes.is_first() else hidden:
        checkpoint.restore(place, state, config=1)


def _reads_truncated_part(place: Path) -> None:
    """The last process finds its part of the newest checkpoint truncated; it must not use the older one alone."""
    read = reading._read_arrays  # pyright: ignore[reportPrivateUsage]

    def cut_off(*arguments: Any) -> None:
        read(*arguments)
        raise ValueError("state/d/1 is cut off")

    broken = mock.patch.object(reading, "_read_arrays", cut_off)
    with nullcontext() if processes.is_first() else broken:
        checkpoint.restore(place, shard_tree(params(), mesh()), config=1)


def _samples_without_rows(index: int) -> None:
    loop = GRPOLoop(MODEL, Words(), TOKENIZER, optimizer(), CONFIG, mesh(), rewards=rewards())
    failing = mock.patch.object(loop_module, "rows_of_step", side_effect=OSError("no answer from the network"))
    with failing if index else nullcontext():
        loop.step(init_state(shard_tree(params(), loop.mesh), loop.optimizer, jax.random.key(3)))


def _fails_in_last(index: int) -> None:
    with processes.all_or_none():
        if index == jax.process_count() - 1:
            raise KeyError("no such row")


def command(folder: Path, out: Path, *more: str) -> None:
    """Runs smd-train on the folder's model and rows."""
    words = ["grpo", "--model", f"{folder}/model", "--dataset", f"{folder}/rows.jsonl"]
    words += ["--reward", "tests.joined:first_is_odd", "--reward-timeout", "None", "--num-prompts", "4"]
    words += ["--num-generations", "2", "--max-completion-length", "4", "--budget", "16", "--buffer", "2"]
    words += ["--eviction", "h2o", "--distill", "none", "--learning-rate", "1e-2"]
    words += ["--fsdp", "2", "--completions-steps", "2", "--save-steps", "1", "--output-dir", str(out)]
    words += ["--eval-steps", "1", "--eval-dataset", f"{folder}/held_out.jsonl", "--eval-decode", "sampler"]
    # A test in one process has eight devices, six of them idle here.
    with mock.patch.object(prepare, "check_devices", lambda used, available: None):
        train.main([*words, *more])


def arrays() -> dict[str, np.ndarray]:
    return {f"{of}: {name}": value for of, take in RUNS.items() for name, value in take().items()}


def main(folder: str, coordinator: str, count: str, index: str) -> None:
    launch.join(LaunchArgs(coordinator=coordinator, num_processes=int(count), process_id=int(index)))
    place, out = Path(folder), Path(folder) / count
    if int(count) == 2:
        results = arrays() | refused_rollout(place / f"{count}_refused") | refusals(int(index), place, out)
        command(place, out, "--max-steps", "3", "--resume")
    else:
        results = on_four_devices()
    if processes.is_first():
        np.savez(place / f"{count}.npz", **results)  # pyright: ignore[reportArgumentType]


if __name__ == "__main__":
    main(*sys.argv[1:])
