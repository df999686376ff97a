"""Arguments of a wrong class or shape in the Python API: each error names what was expected and what was passed."""

import subprocess
import sys

# Runs in a subprocess without jaxtyping, which under pytest raises before the library does.
PREAMBLE = """
from dataclasses import dataclass, replace
import jax, jax.numpy as jnp, numpy as np, optax
import smd_jax as smd
from smd_jax.losses.policy import eviction_loss
from smd_jax.losses.value import terminal_rewards, whiten
from smd_jax.message import dense_mask
from smd_jax.model import stack_params
from smd_jax.tasks.task import prompt_text
from smd_jax.testing import byte_tokenizer, random_params, tiny_model_config
from smd_kernels import BlockSizes

config = tiny_model_config(num_layers=1)
model, params, adam = smd.Decoder(config), random_params(config), optax.adam(1e-3)
tokens = jnp.array([[0, 5, 6], [7, 8, 9]])
prompts = smd.PromptBatch(tokens, tokens > 0)
sizes = smd.RolloutConfig(max_new_tokens=4, budget=4, buffer=2)
policy = smd.eviction.Knorm()
key = jax.random.key(0)

def sample(model=model, config=sizes, params=params):
    return smd.rollout(model, params, prompts, key, policy=policy, config=config)

q = jnp.zeros((1, 2, 4, 16))
row, square, mask = jnp.zeros(4), jnp.zeros((4, 6)), jnp.ones((4, 6), bool)
trajectory = sample()
batch = smd.TrainBatch(trajectory, jnp.ones(2), None)

def step(update=smd.UpdateConfig(), **changed):
    state = smd.init_state(jax.tree.map(jnp.copy, params), adam, key)
    return smd.make_update(model, adam, update)(state, batch.replace(**changed))

@dataclass
class Unhashable:
    shape = encode_positions = hidden = logits = compute_params = print

@dataclass(frozen=True)
class Term(smd.learner.Term):
    metric: bool
    def evaluate(self, inputs):
        found = {"m": inputs.logprobs} if self.metric else {}
        logprobs = inputs.logprobs if self.metric else inputs.logprobs_under["dense"]
        return smd.learner.TermOutputs(logprobs.sum(), found)

@dataclass(frozen=True)
class Surrogate(smd.losses.Surrogate):
    def terms(self, inputs):
        return inputs.ratio * inputs.advantages

@dataclass(frozen=True)
class Wrong(smd.losses.Surrogate):
    part: str
    def terms(self, inputs):
        objective = {"rows": inputs.advantages[:, 0], "none": None}.get(self.part, inputs.ratio)
        metrics = {"list": [], "number": {"m": jnp.ones(())}}.get(self.part, {})
        return smd.losses.SurrogateTerms(objective, metrics)

def surrogate(part):
    return smd.UpdateConfig(loss=smd.LossConfig(surrogate=Wrong(part)))

@dataclass(frozen=True)
class Correction(smd.corrections.Correction):
    def terms(self, inputs):
        return jnp.exp(inputs.old_logprobs - inputs.sampler_logprobs)

def foreign(logprobs, dropped=[[]]):
    sizes = dict(terminated=[True], layers=1, kv_heads=1, dropped=dropped)
    return smd.Trajectory.from_records([[1, 2]], [[3, 4]], logprobs, **sizes)

def corrected(correction):
    return smd.UpdateConfig(visibility="dense", correction=correction)

loops = smd.train.GRPOConfig(prompts_per_step=2, group_size=2, prompt_width=4, policy=policy, rollout=sizes)

class Empty:
    reward = __getitem__ = print
    def __len__(self):
        return 0

def loop(task, **options):
    return smd.train.GRPOLoop(model, task, byte_tokenizer(), adam, loops, **options)

def print_error(call):
    try:
        call()
    except (TypeError, ValueError, KeyError) as error:
        print(f"{type(error).__name__}: {error}")
    else:
        print("accepted")

"""

MODEL = "a model with shape, encode_positions, hidden, logits and compute_params, such as smd.Decoder(config)"
BOOLEANS = (
    "evicted_at as integers, the first query that cannot see each key; got bool. Booleans: ShadowMask.from_boolean"
)
# Calls and messages, without "expected".
TYPE_ERRORS = [
    ("sample(model=config)", f"{MODEL}; got ModelConfig"),
    ("sample(model=smd.Decoder)", f"{MODEL}; got Decoder"),
    ("smd.replay(params, model, trajectory)", f"{MODEL}; got dict"),
    ("smd.Engine(config, policy, sizes, decode_rows=2)", f"{MODEL}; got ModelConfig"),
    ("smd.make_update(config, adam, smd.UpdateConfig())", f"{MODEL}; got ModelConfig"),
    (
        "sample(model=Unhashable())",
        "a hashable model, because programs are compiled once per model: unhashable type: 'Unhashable'. Use a "
        "dataclass with frozen=True",
    ),
    ("sample(config={'budget': 4})", "config to be a RolloutConfig; got dict"),
    ("smd.Engine(model, policy, smd.UpdateConfig(), decode_rows=2)", "config to be a RolloutConfig; got UpdateConfig"),
    ("smd.replay(model, params, batch)", "trajectory to be a Trajectory; got TrainBatch"),
    (
        "smd.encode_prompts(byte_tokenizer(), ['a', [{'role': 'user', 'content': 'b'}]])",
        "texts; got list as prompt 1. Chat messages become text by tokenizer.apply_chat_template(messages, "
        "tokenize=False, add_generation_prompt=True)",
    ),
    ("dense_mask(trajectory)", "valid as an array, as jnp.asarray gives; got Trajectory"),
    ("smd.init_state(adam, params, key)", "optimizer to be a GradientTransformation; got dict"),
    ("smd.init_state(params, adam, 0)", "a key of jax.random.key(seed); got 0"),
    ("smd.make_update(model, 1e-3, smd.UpdateConfig())", "optimizer to be a GradientTransformation; got float"),
    ("smd.make_update(model, adam, smd.losses.grpo())", "config to be a UpdateConfig; got LossConfig"),
    ("step(advantages=[1.0, 1.0])", "advantages as an array, as jnp.asarray gives; got list"),
    ("step(counted_rows=jnp.ones(2, int))", "counted_rows as booleans; got int32"),
    (
        "step(smd.UpdateConfig(loss=smd.LossConfig(surrogate=Surrogate())))",
        "the result of Surrogate.terms to be a SurrogateTerms; got an array",
    ),
    ("step(surrogate('none'))", "objective of Wrong.terms as an array [2, 4]; got None"),
    ("step(surrogate('list'))", "the metrics of Wrong.terms to be a dict; got list"),
    ("smd.ShadowMask(jnp.zeros((2, 1, 2, 7), bool)).layer(0)", BOOLEANS),
    ("smd.ShadowMask(jnp.zeros((2, 1, 2, 7), bool)).to_boolean()", BOOLEANS),
    ("smd.KeyInterval(jnp.zeros((2, 2, 7), bool)).to_boolean()", BOOLEANS),
    ("smd.attend(q, q, q, smd.KeyInterval(jnp.zeros((1, 2, 4), bool)))", BOOLEANS),
    ("smd.attend(*[q.astype(int)] * 3, smd.KeyInterval(jnp.zeros((1, 2, 4), int)))", "q as floats; got int32"),
    ("smd.replay(model, params, trajectory.replace(mask=smd.ShadowMask(trajectory.mask.evicted_at > 5)))", BOOLEANS),
    (
        "smd.rollout(model, params, smd.PromptBatch([[1]], [[True]]), key, policy=policy, config=sizes)",
        "tokens as an array, as jnp.asarray gives; got list",
    ),
    ("foreign([[-1.0, -2.0]], dropped=[None])", "a list of compressions of row 0; got NoneType"),
    (
        "foreign([[-1.0, -2.0]], dropped=[[(1.5, [[[0]]])]])",
        "a compression as (last query, keys); got (1.5, [[[0]]]) (row 0, compression 0)",
    ),
    ("loop([{'prompt': 'a'}])", "task to be a Task; got list"),
    ("smd.tasks.Rewards(len)", "functions as a tuple; got builtin_function_or_method"),
    ("loop([], rewards=len)", "rewards to be a Rewards; got builtin_function_or_method"),
    ("loop(smd.tasks.DatasetTask([{'prompt': 'a'}], len)).step(params)", "state to be a TrainState; got dict"),
    ("step(corrected(Correction()))", "the result of Correction.terms to be a CorrectionTerms; got an array"),
    (
        "step(corrected(smd.corrections.Chain((smd.corrections.Naive(), Correction()))))",
        "the result of Correction.terms to be a CorrectionTerms; got an array",
    ),
    (
        "trajectory.mask.with_segments(smd.Segments(3, 2, 4))",
        "a tuple of Segments, one for all layers or one for each; got Segments(first=3, length=2, budget=4)",
    ),
    ("smd.save_checkpoint('unwritten', params, model.shape)", "config to be a ModelConfig; got ModelShape"),
]
VALUE_ERRORS = [
    (
        "prompt_text({'question': 'a', 'answer': 'b'}, byte_tokenizer())",
        "a row with a prompt; got the fields question, answer",
    ),
    ("loop(Empty())", "a task with at least one row; got none"),
    ("loop(smd.tasks.DatasetTask([{'prompt': 'a'}]))", "a reward function, because this data defines none; got None"),
    ("step(surrogate('rows'))", "objective of Wrong.terms of shape [2, 4]; got [2]"),
    ("step(surrogate('number'))", "m of Wrong.terms of shape [2, 4]; got []"),
    (
        "smd.environments.open_environments(policy)",
        "a class or function that makes an environment; got an object of Knorm: give the class, not an object",
    ),
    (
        "foreign([[{3: print}, {4: print}]])",
        "numbers as log-probabilities of row 0; got vLLM's dicts of tokens: take entry[token].logprob of each "
        "response token",
    ),
    (
        "foreign([[(-1.0, 3, None), (-2.0, 4, None)]])",
        "numbers as log-probabilities of row 0; got tuples such as SGLang's (logprob, token, text): take the "
        "first number of each",
    ),
    ("foreign([[print, print]])", "numbers as log-probabilities of row 0; got objects of builtin_function_or_method"),
    (
        "foreign([[-1.0, -2.0]], dropped=None)",
        "exactly one of kept, dropped, evicted_at; got none. For an engine without evictions give dropped=[[]] * rows",
    ),
    (
        "sample(params=random_params(tiny_model_config(num_layers=2)))",
        "parameters of 1 layers with tied embeddings, as the config says; got layers_1, too",
    ),
    (
        "sample(params=stack_params(random_params(tiny_model_config(num_layers=4)), [range(4)]))",
        "parameters of 1 layers with tied embeddings, as the config says; got layers_0_to_3, too",
    ),
    (
        "sample(params=random_params(replace(config, tie_embeddings=False)))",
        "parameters of 1 layers with tied embeddings, as the config says; got lm_head, too",
    ),
    ("BlockSizes(keys='8')", "keys >= 1, a whole number; got '8'"),
    ("dense_mask(jnp.ones(3, bool))", "valid of shape [batch, keys]; got [3]"),
    ("step(advantages=jnp.ones((2, 1)))", "advantages of shape [2] or [2, 4]; got [2, 1]"),
    ("step(old_logprobs=jnp.ones((2, 3)))", "old_logprobs of shape [2, 4]; got [2, 3]"),
    ("step(counted_rows=jnp.ones((2, 4), bool))", "counted_rows of shape [2]; got [2, 4]"),
    ("smd.learner.Needs(logprobs={'full'})", "the masks in logprobs of Needs to be one of shadow, dense; got 'full'"),
    (
        "smd.learner.Needs(reference_logprobs={'full'})",
        "the masks in reference_logprobs of Needs to be one of shadow, dense; got 'full'",
    ),
    ("smd.learner.make_replay(model, 'dens')", "visibility to be one of shadow, dense; got 'dens'"),
    ("smd.learner.make_replay(model, 'shadow', 0)(params, trajectory)", "a microbatch_size that divides 2 rows; got 0"),
    ("step(smd.UpdateConfig(terms=(Term(True),)))", "a number as metric 'm' of Term; got shape [2, 4]"),
    ("smd.losses.group_relative(row[:, None], 2)", "rewards of shape [batch]; got [4, 1]"),
    ("smd.losses.leave_one_out(row[0], 2)", "rewards of shape [batch]; got []"),
    ("smd.losses.groups_with_signal(square, 2)", "rewards of shape [batch]; got [4, 6]"),
    ("smd.losses.best_worst(square, 2)", "rewards of shape [batch]; got [4, 6]"),
    ("terminal_rewards(row[:, None], mask)", "rewards of shape [4]; got [4, 1]"),
    ("whiten(row, mask)", "advantages of shape [4, 6]; got [4]"),
    ("smd.losses.gae(square, row[:, None], mask)", "values of shape [4, 6]; got [4, 1]"),
    ("smd.losses.gae(square[0], square, mask)", "rewards of shape [4, 6]; got [6]"),
    (
        "smd.losses.value_loss(square, square, square[0], square, smd.losses.ValueConfig())",
        "returns of shape [4, 6]; got [6]",
    ),
    ("smd.losses.SequenceMean().weights(row > 0)", "mask of shape [batch, R]; got [4]"),
    ("smd.losses.TokenMean().weights(mask, mask[0])", "counted_rows of shape [4]; got [6]"),
    ("eviction_loss(*[jnp.zeros((4, 1, 1, 2))] * 2, square, jnp.zeros((4, 2)))", "advantages of shape [4]; got [4, 6]"),
]
CASES = [(call, f"TypeError: expected {message}") for call, message in TYPE_ERRORS]
CASES += [(call, f"ValueError: expected {message}") for call, message in VALUE_ERRORS]
NEEDS = "KeyError: \"expected a term that reads 'dense' to declare it: needs = Needs(logprobs={'dense'})\""
CASES.append(("step(smd.UpdateConfig(terms=(Term(False),)))", NEEDS))


def test_advantages_of_numpy_rewards():
    # jaxtyping, active under pytest, would raise.
    program = """
import numpy as np, smd_jax as smd
rewards = np.array([1.0, 0.0])
print(*smd.losses.leave_one_out(rewards, 2).tolist(), *smd.losses.group_relative(rewards, 2, "none").tolist())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "1.0 -1.0 0.5 -0.5\n"


def test_errors_of_wrong_objects():
    program = PREAMBLE + "\n".join(f"print_error(lambda: {call})" for call, _ in CASES)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [message for _, message in CASES]
