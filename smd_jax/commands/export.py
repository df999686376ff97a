"""smd-export: exports a checkpoint of a run for transformers, vLLM or PEFT.

    smd-export runs/train --out my-model                       the newest checkpoint, in Hugging Face's format
    smd-export runs/train --out my-model --step 40 --export-dtype bfloat16
    smd-export runs/train --out my-adapter --format peft       only the adapters, for a run with --lora-r
    smd-export runs/train --out my-gate --format gate          only the eviction gate, for a run with --eviction gate

Does not change the run. --config FILE reads options from a YAML file; flags override them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import jax
import tyro

from smd_jax.commands.arguments import Common
from smd_jax.commands.choices import eviction_policy
from smd_jax.commands.command_line import arguments_of_run, parse_words
from smd_jax.commands.config_file import with_file
from smd_jax.commands.console_scripts import smd_export
from smd_jax.commands.errors import UserError, as_user_errors, report_errors
from smd_jax.commands.model_source import model_directory, open_model, save_model
from smd_jax.commands.places import full_path
from smd_jax.commands.policy_texts import trained_gate
from smd_jax.commands.prepare import lora_config, shapes, with_parts
from smd_jax.config import ModelConfig
from smd_jax.disk import check_writable
from smd_jax.model.decoder import Decoder
from smd_jax.model.gate_format import save_gate
from smd_jax.model.lora import has_lora
from smd_jax.model.peft_format import save_peft
from smd_jax.model.protocol import Params
from smd_jax.model.value_head import drop_value_head
from smd_jax.model.weights import check_export, load_checkpoint, read_config
from smd_jax.runs.checkpoint.errors import DamagedCheckpointError
from smd_jax.runs.checkpoint.reading import restore_part
from smd_jax.runs.frozen_base import params_with_base, params_without_base
from smd_jax.runs.run_folder import CHECKPOINTS
from smd_jax.runs.run_log import best_rollout


@dataclass(frozen=True, kw_only=True)
class Args:
    """Exports the model of a checkpoint."""

    run: tyro.conf.Positional[Path]  # directory of the run
    model: str | None = None  # base model of the run, if it has moved; None: as in the run's config.yaml
    out: Path  # directory to write; for --format hf, an existing one may hold only an older export
    step: int | None = None  # checkpoint after this many rollouts; None is the newest
    best: bool = False  # the checkpoint with the best metric
    format: Literal["hf", "peft", "gate"] = "hf"  # hf: all weights, adapters merged; peft, gate: only these
    export_dtype: Literal["float32", "bfloat16"] = "float32"  # dtype of the weights; bfloat16 loses small steps


def main(words: Sequence[str] | None = None) -> None:
    """The console script."""
    with report_errors(words) as given, as_user_errors():
        run(parse_words(Args, "smd-export", __doc__ or "", with_file(given, Args)))


def run(args: Args) -> None:
    """Writes the model and prints its directory. Raises UserError, ValueError or OSError for no run in the directory,
    no such checkpoint, --best with --step, the base model or other files as --out, or a full disk."""
    if args.best and args.step is not None:
        raise UserError(f"expected --best or --step; got both, with --step {args.step}")
    args = replace(args, out=full_path(args.out))
    if args.format == "hf":
        check_export(args.out, 0)
    else:  # these formats keep other files
        check_writable(args.out)
    if args.format == "peft" and (args.out / "config.json").exists():
        # transformers would open the adapter and its base in place of this model.
        raise UserError(f"expected --out without a model for --format peft; got {args.out}, which has a config.json")
    trained = arguments_of_run(args.run)
    if args.model is not None:
        trained = replace(trained, model=replace(trained.model, model=args.model, model_revision=None))
    directory = model_directory(trained.model.model, trained.model.model_revision)
    if args.out.exists() and args.out.samefile(directory):
        raise UserError(f"expected --out elsewhere than the base model of the run; got {args.out}")
    config = read_config(directory)
    try:
        params = trained_model(args, trained, directory, config)
    except DamagedCheckpointError as error:
        raise UserError(f"{error}. --step names another checkpoint") from error
    if args.format == "peft":
        if not has_lora(params):
            raise UserError(f"expected a run with --lora-r for --format peft; got {args.run}, which has no adapters")
        base = trained.model.model
        save_peft(args.out, params, config, base_model=base, base_directory=directory, dtype=args.export_dtype)
    elif args.format == "gate":
        gate = trained_gate(eviction_policy(trained.sampler))
        if gate is None:
            raise UserError(f"expected a run with --eviction gate for --format gate; got {args.run}, which has no gate")
        save_gate(args.out, params, gate)
    else:  # the other formats need no tokenizer
        opened = open_model(trained.model, trained.data, trained.sampler)
        save_model(args.out, params, opened, args.export_dtype)
    print(args.out)


def trained_model(args: Args, trained: Common, directory: Path, config: ModelConfig) -> Params:
    """Parameters of the checkpoint without the critic. Adapters are put on the base model they were trained on."""
    place, step = args.run / CHECKPOINTS, args.step
    if args.best:
        best = best_rollout(args.run, trained.evaluation.objective)
        if best is None:
            raise UserError(
                f"expected a run with --metric-for-best-model for --best; got {args.run}, whose checkpoints have no "
                "such value"
            )
        step = best.done
    if lora_config(trained.model) is None:
        like = shapes(trained, Decoder(config))
        return drop_value_head(restore_part(place, {"params": like}, step)["params"])
    _, base = load_checkpoint(directory, dtype=trained.model.param_dtype)
    whole = with_parts(trained, base, config, jax.random.key(0))
    saved = restore_part(place, {"params": params_without_base(whole)}, step)["params"]
    return drop_value_head(params_with_base(saved, whole))


if __name__ == "__main__":
    smd_export()
