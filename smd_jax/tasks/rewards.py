"""Several reward functions, their failures, and the reward that training gets.

    functions ─► one value per completion and function ─► weighted sum ─► rewards [batch], NaN where one failed

A function may raise, hang or return nonsense for some completions. Training leaves these out as if they had never been
sampled, and compares the rest of their group. A reward of 0 instead would teach the policy to avoid (or, with negative
rewards, to seek) failures. A mean instead would shrink the deviation that divides the advantages of the others.
"""

from __future__ import annotations

import functools
import inspect
import reprlib
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from smd_jax.config import check_time_limit
from smd_jax.tasks.reward_callers import CallsHere, CallsInProcess
from smd_jax.tasks.reward_calls import ANOTHER_NUMBER, Failed, Value
from smd_jax.tasks.task import Prompt, completion_of
from smd_jax.text.visible_text import visible

RewardFunction = Callable[..., Any]  # TRL's (prompts, completions, **columns) -> list[float | None], also async

GIVEN = ("prompts", "completions", "completion_ids")  # arguments of every rollout

SEARCH_LIMITS = 10  # limit of a search row by row, in limits of one call


class TooManyFailures(RuntimeError):
    """Too many completions of a batch have no reward."""


class RewardWarning(UserWarning):
    """A completion has no reward; warned once per kind of failure."""


class Failure(NamedTuple):
    """Why a completion has no reward.

    Attributes:
      row: number of the completion in its batch.
      function: name of the function that failed; empty if no single one did, such as for None from all of them.
      kind: the exception's class, or a word such as "time"; each kind is reported once.
      message: what was expected, and what came.
    """

    row: int
    function: str
    kind: str
    message: str

    def described(self) -> str:
        """Describes the failure; escapes control characters, because a message may quote a completion."""
        whose = f"reward {self.function!r}" if self.function else "the sum of the rewards"
        return f"{whose} failed on completion {self.row}: {visible(self.message)}"


class Graded(NamedTuple):
    """The rewards of a batch of completions.

    Attributes:
      rewards: float32 `[batch]`, the weighted sum; NaN for a failed completion.
      parts: float32 `[batch]` of each function, before weighting; NaN where it failed or does not apply (None).
      failures: at most one per completion and function, and at least one per failed completion.
    """

    rewards: Float[np.ndarray, " batch"]
    parts: dict[str, Float[np.ndarray, " batch"]]
    failures: tuple[Failure, ...]

    @property
    def rewarded_rows(self) -> Bool[np.ndarray, " batch"]:
        """Mask of the completions with a reward."""
        return ~np.isnan(self.rewards)


@dataclass(frozen=True)
class Rewards:
    """Several reward functions and their weights: TRL's `reward_funcs` and `reward_weights`.

    A function is called as `function(prompts=..., completions=..., completion_ids=..., <columns of the rows>)`, by name
    and with lists of one value per completion. Without `**kwargs` it gets the arguments that it names. It returns a
    list of numbers, with None where it does not apply, and may be async. The completion of chat messages is
    `[{"role": "assistant", "content": text}]`, else text.

    A call that raises or takes too long is repeated row by row, to find the rows that cause it. That search ends after
    ten times the limit, and rows that it did not reach have failed. If a call returns another number of rewards, all of
    its rows have failed. A completion fails if one function fails on it, because its sum could not be compared within
    its group, or if every function returns None.

    Attributes:
      functions: at least one.
      weights: one per function; None: 1 each.
      names: distinct names for the metrics, one per function; None: the names of the functions.
      seconds: wall-clock limit of a call. Each function then runs in its own process, in parallel with the others, and
        must be one that a new Python can import, see `smd_jax.tasks.reward_callers`. None: in this process, without a
        limit.
      max_failed: share of the completions of a batch, over all hosts, that may fail; more end the run.
    """

    functions: tuple[RewardFunction, ...]
    weights: tuple[float, ...] | None = None
    names: tuple[str, ...] | None = None
    seconds: float | None = 60.0
    max_failed: float = 0.25

    def __post_init__(self) -> None:
        if not isinstance(self.functions, Sequence):
            raise TypeError(f"expected functions as a tuple; got {type(self.functions).__name__}")
        if not self.functions:
            raise ValueError("expected at least one reward function; got none")
        for what, values in (("weights", self.weights), ("names", self.names)):
            if values is not None and len(values) != len(self.functions):
                raise ValueError(
                    f"expected {len(self.functions)} {what}, one per reward function; got {len(values)}: {values}"
                )
        if not np.isfinite(self.weights or 0.0).all():
            raise ValueError(f"expected finite weights; got {self.weights}")
        if len(set(self.logged_names)) < len(self.functions):
            raise ValueError(
                f"expected reward functions of different names, or names=(...) to log them under; "
                f"got {self.logged_names}"
            )
        if self.seconds is not None:
            check_time_limit(self.seconds)
        if not 0 <= self.max_failed <= 1:
            raise ValueError(f"expected a share of failures from 0 to 1; got {self.max_failed}")
        assert self._callers  # made now, for the errors of functions that cannot run in their own process

    @functools.cached_property
    def logged_names(self) -> tuple[str, ...]:
        """A name per function."""
        return self.names or tuple(map(function_name, self.functions))

    @functools.cached_property
    def _callers(self) -> dict[str, CallsHere | CallsInProcess]:
        pairs = zip(self.logged_names, self.functions, strict=True)
        if self.seconds is None:
            return {name: CallsHere(function) for name, function in pairs}
        return {name: CallsInProcess(name, function, self.seconds) for name, function in pairs}

    @functools.cached_property
    def _warned(self) -> set[tuple[str, str]]:
        """(function, kind) of the reported failures."""
        return set()

    @functools.cached_property
    def _known(self) -> set[str]:
        """Names of the fields that rows may have, from `prepare`."""
        return set()

    def lacks(self, columns: Iterable[str]) -> list[str]:
        """Arguments that functions require and neither a rollout nor rows of these columns have."""
        given = {*GIVEN, *columns}
        return [name for function in self.functions for name in required_names(function) if name not in given]

    def prepare(self, columns: Iterable[str]) -> None:
        """Starts the functions' processes without waiting: call it before slow work, such as compilation.

        Args:
          columns: names of the rows' fields other than the prompt. A column that no row of a batch has is None.

        Raises:
          ValueError: a function requires an argument that does not exist.
        """
        self._known.update(columns)
        for name, function in zip(self.logged_names, self.functions, strict=True):
            accepted_names(name, function, {*GIVEN, *self._known})
        for caller in self._callers.values():
            caller.start()

    def grade(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
    ) -> Graded:
        """The rewards of a batch.

        Args:
          prompts, completions, completion_ids: one each per completion: its prompt, its text, and its tokens, EOS
            included.
          columns: the other fields of the rows, one value per completion.

        Raises:
          TooManyFailures: for more than `max_failed` of the completions.
          ValueError: arguments of different lengths; a function with a required argument that does not exist.
        """
        graded = self.grade_part(prompts, completions, completion_ids, columns)
        check_failures(graded, self.max_failed)
        return graded

    def grade_part(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
    ) -> Graded:
        """Grades a part of a batch, such as one host's; all of it may fail. Then see `check_failures`."""
        rows = len(completions)
        shaped = [completion_of(prompt, text) for prompt, text in zip(prompts, completions, strict=True)]
        absent = {name: [None] * rows for name in self._known}
        of_rollout = {"prompts": list(prompts), "completions": shaped, "completion_ids": list(completion_ids)}
        arguments = {**absent, **columns, **of_rollout}
        for name, values in arguments.items():
            if len(values) != rows:
                raise ValueError(f"expected {rows} values in {name!r}, one per completion; got {len(values)}")
        values = self._call_all(arguments, rows)
        parts = {
            name: np.array([np.nan if isinstance(x, tuple) or x is None else x for x in column], np.float32)
            for name, column in values.items()
        }
        failures = [
            Failure(row, name, *value)
            for name, column in values.items()
            for row, value in enumerate(column)
            if isinstance(value, tuple)
        ]
        rewards = self._sum(parts)
        failed = {failure.row for failure in failures}
        for row in sorted(set(range(rows)) - failed):
            if all(np.isnan(part[row]) for part in parts.values()):
                failures.append(Failure(row, "", "None", "expected a number from at least one; got None from all"))
            elif np.isinf(rewards[row]):
                failures.append(Failure(row, "", "sum", "its weighted sum is no finite float32"))
        rewards[[failure.row for failure in failures]] = np.nan
        for failure in failures:
            said = f"{failure.described()}; its prompt is {reprlib.repr(prompts[failure.row])}"
            self._warn_once(failure.function, failure.kind, said)
        return Graded(rewards, parts, tuple(failures))

    def _call_all(self, arguments: Mapping[str, Sequence[Any]], rows: int) -> dict[str, list[Value]]:
        """Every function's value of every row."""
        calls = {
            name: {accepted: list(arguments[accepted]) for accepted in accepted_names(name, function, arguments)}
            for name, function in zip(self.logged_names, self.functions, strict=True)
        }
        # Begins all calls before it waits for the first.
        for name, given in calls.items():
            self._callers[name].begin(given, rows)
        outcomes = {name: self._callers[name].finish() for name in calls}
        return {
            name: outcome if isinstance(outcome, list) else self._search(name, calls[name], rows, outcome)
            for name, outcome in outcomes.items()
        }

    def _search(self, name: str, arguments: Mapping[str, Any], rows: int, failed: Failed) -> list[Value]:
        """Repeats a failed call row by row."""
        # Another number of rewards, such as one mean of all, is no reward of any completion.
        if rows == 1 or failed[0] == ANOTHER_NUMBER:
            return [failed] * rows
        began = time.monotonic()
        values = list[Value]()
        for row in range(rows):
            if self.seconds is not None and time.monotonic() - began >= SEARCH_LIMITS * self.seconds:
                late = f"not reached within {SEARCH_LIMITS * self.seconds:g} s, row by row"
                return values + [(failed[0], f"{failed[1]}; {late}")] * (rows - row)
            self._callers[name].begin({key: column[row : row + 1] for key, column in arguments.items()}, 1)
            outcome = self._callers[name].finish()
            values += [outcome] if isinstance(outcome, tuple) else outcome
        if not any(isinstance(value, tuple) for value in values):
            together = f"reward {name!r} failed on {rows} completions together, but on none of them separately"
            self._warn_once(name, failed[0], f"{together}: {failed[1]}")
        return values

    def _sum(self, parts: Mapping[str, np.ndarray]) -> np.ndarray:
        weights = self.weights or (1.0,) * len(parts)
        # None adds nothing to the sum, as in TRL. In float64, so that nothing is rounded twice.
        terms = [w * np.nan_to_num(part.astype(np.float64)) for w, part in zip(weights, parts.values(), strict=True)]
        with np.errstate(over="ignore"):
            return np.sum(terms, axis=0).astype(np.float32)

    def _warn_once(self, name: str, kind: str, text: str) -> None:
        if (name, kind) not in self._warned:
            self._warned.add((name, kind))
            warnings.warn(text, RewardWarning, stacklevel=3)


def check_failures(graded: Graded, max_failed: float) -> None:
    """Raises TooManyFailures if more than a share of the completions of a whole batch have no reward."""
    failed = int(np.isnan(graded.rewards).sum())
    if failed <= max_failed * len(graded.rewards):
        return
    kinds = Counter((failure.function, failure.kind) for failure in graded.failures)
    most, _ = kinds.most_common(1)[0]
    first = next(failure for failure in graded.failures if (failure.function, failure.kind) == most)
    raise TooManyFailures(
        f"expected at most {max_failed:.0%} of the completions without a reward; got {failed} of "
        f"{len(graded.rewards)}. The most frequent: {first.described()}"
    )


def function_name(function: RewardFunction) -> str:
    """The name of a function in the metrics: its `__name__`, or that of its class, as in TRL."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(function.__name__ if hasattr(function, "__name__") else type(function).__name__)


def accepted_names(name: str, function: RewardFunction, given: Iterable[str]) -> list[str]:
    """The given arguments that a function takes: all if it has `**kwargs`, else those that it names.

    Raises:
      ValueError: it requires another one.
    """
    given = list(given)
    missing = [parameter for parameter in required_names(function) if parameter not in given]
    if missing:
        raise ValueError(
            f"expected reward {name!r} to ask for some of {sorted(given)}; got {missing} among its parameters, which "
            "neither a rollout nor the rows have"
        )
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return given
    return [argument for argument in given if argument in parameters]


def required_names(function: RewardFunction) -> list[str]:
    """The names of a function's required arguments."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind in named]
