"""Metrics for Weights & Biases. Needs `wandb`: `pip install -e '.[wandb]'`."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from smd_jax.disk import replaced
from smd_jax.monitor.loggers import check_installed, dashboard_name, is_evaluation
from smd_jax.text.visible_text import one_line

Mode = Literal["online", "offline"]


def check_wandb() -> None:
    """Raises MissingExtraError without wandb."""
    check_installed("wandb", "wandb", "Weights & Biases needs")


class WandbLogger:
    """Logs to Weights & Biases, or with "offline" only into `directory/wandb`, for a later `wandb sync`.

    `directory/wandb.json` holds the run's id and its next steps. A resumed run continues under the same id and skips
    the steps that were logged before: repeated steps are bitwise equal. Weights & Biases takes no row of an earlier
    step, so an evaluation that the run before left out appears one step later,
    unless that step has one, too.

    Args:
      directory: of the run.
      project: of the run; None: the variable WANDB_PROJECT, or else smd_jax.
      name: of the run; None: Weights & Biases chooses one.
      config: shown as the run's configuration.
      mode: "offline" needs neither a network nor an account; None: the variable WANDB_MODE, or else "online".
      resume: continue the run of this directory, if there is one.

    Raises:
      MissingExtraError: without wandb.
      OSError: Weights & Biases does not start, as online without a key or a network.
    """

    def __init__(
        self,
        directory: str | Path,
        project: str | None = None,
        *,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        mode: Mode | None = None,
        resume: bool = False,
    ) -> None:
        check_wandb()
        import wandb

        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        self._file = directory / "wandb.json"
        known = json.loads(self._file.read_text()) if resume and self._file.is_file() else {}
        self._id: str = known.get("id", secrets.token_hex(4))
        self._first_step: int = known.get("next_step", 0)
        self._first_evaluation: int = known.get("next_evaluation", self._first_step)
        self._next_step, self._next_evaluation = self._first_step, self._first_evaluation
        try:
            self._run = wandb.init(
                project=project or os.environ.get("WANDB_PROJECT") or "smd_jax",
                name=name,
                id=self._id,
                dir=directory,
                config=None if config is None else dict(config),
                mode=mode,
                resume="allow",
                # Keeps this run separate from other runs in the process, such as the user's own.
                reinit="create_new",
                # Not captured: standard output has frames of the progress bar.
                settings=wandb.Settings(console="off", silent=True),
            )
        except wandb.Error as error:
            got = one_line(str(error), 300).rstrip(".")
            raise OSError(
                f"expected Weights & Biases to start; got {got}. `wandb login` stores a key; WANDB_MODE=offline writes "
                "files to upload later"
            ) from error
        self._save()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        of_evaluation = is_evaluation(metrics)
        if step < (self._first_evaluation if of_evaluation else self._first_step):
            return
        named = {dashboard_name(name): value for name, value in metrics.items()}
        self._run.log(named, step=max(step, self._first_step))
        if of_evaluation:
            self._next_evaluation = step + 1
        else:
            self._next_step = step + 1
        self._save()

    def close(self) -> None:
        self._run.finish()

    def _save(self) -> None:
        known = {"id": self._id, "next_step": self._next_step, "next_evaluation": self._next_evaluation}
        with replaced(self._file) as temporary:
            temporary.write_text(json.dumps(known) + "\n")
