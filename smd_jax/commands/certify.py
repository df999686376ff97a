"""smd-certify: checks whether a rollout was sampled from the policy to be trained.

    smd-certify rollout.npz --model DIR                     prints the difference, and the cause if there is one
    smd-certify rollout.npz --model DIR --out report.html   one page with a picture; report.json for other programs

Replays a record of any sampler through the model, under the recorded evictions, positions and sampling support. The
format is in docs/certify.md. Exit status 0: one policy; 1: not one policy; 2: the record or the model cannot be
read, or the model gives NaN.
--config FILE reads options from a YAML file; flags override them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from smd_jax.certify import report
from smd_jax.certify.causes import prompt_facts
from smd_jax.certify.record import load_record
from smd_jax.certify.verdict import Models, certify
from smd_jax.commands.command_line import parse_words
from smd_jax.commands.config_file import with_file
from smd_jax.commands.console_scripts import smd_certify
from smd_jax.commands.errors import UserError, as_user_errors, report_errors
from smd_jax.commands.model_source import has_tokenizer, load_tokenizer, model_directory
from smd_jax.model.decoder import Decoder
from smd_jax.model.weights import load_checkpoint, read_config


@dataclass(frozen=True, kw_only=True)
class Args:
    """Replays a recorded rollout."""

    record: tyro.conf.Positional[Path]  # .npz or .safetensors
    model: str  # directory of a checkpoint in Hugging Face's format, or an id on the Hub: the model to be trained
    tokenizer: str | None = None  # a directory, or an id on the Hub; None: the model's own, if it has one
    previous: str | None = None  # an older checkpoint that the sampler may have used
    dtype: Literal["float32", "bfloat16"] = "float32"  # compute dtype of the sampler
    rows: int = 8  # number of replayed rows, from the first on
    out: Path | None = None  # .html or .json


def main(words: Sequence[str] | None = None) -> None:
    """The console script."""
    with report_errors(words) as given, as_user_errors():
        one_policy = run(parse_words(Args, "smd-certify", __doc__ or "", with_file(given, Args)))
    if not one_policy:
        raise SystemExit(1)


def run(args: Args) -> bool:
    """Prints the verdict and writes the report. Returns whether sampler and learner are one policy. Raises UserError,
    ValueError or OSError if a record or a model cannot be read, a model gives NaN, or a report cannot be written."""
    if args.out is not None:
        if args.out.suffix not in (".html", ".json"):
            raise UserError(f"expected --out to end in .html or .json; got {args.out}")
        if args.out.exists():
            raise UserError(f"expected no file at --out {args.out}; found one")
    if args.rows < 1:
        raise UserError(f"expected --rows >= 1; got {args.rows}")
    directory = model_directory(args.model)
    config = read_config(directory)
    experts = Decoder(config).shape.routing
    record = load_record(args.record, config.num_layers, config.num_kv_heads, config.vocab_size, experts)
    facts = None
    if args.tokenizer is not None or has_tokenizer(directory):
        facts = prompt_facts(load_tokenizer(directory, args.tokenizer))
    else:
        print("prompt      no tokenizer: BOS token and chat template are not tested (--tokenizer)")
    config, params = load_checkpoint(directory)
    other = "bfloat16" if args.dtype == "float32" else "float32"
    computed = {name: Decoder(dataclasses.replace(config, dtype=name)) for name in ("float32", "bfloat16")}
    previous = None if args.previous is None else load_checkpoint(model_directory(args.previous))[1]
    models = Models(computed[args.dtype], params, (computed[other], params), other, previous)
    verdict = certify(models, record.first_rows(args.rows), facts)
    print("\n".join(report.lines(verdict)))
    if args.out is not None:
        title = f"{args.record.name} replayed"
        as_json = args.out.suffix == ".json"
        text = (
            json.dumps(report.to_json(verdict), indent=1, allow_nan=False)
            if as_json
            else report.to_html(verdict, title)
        )
        args.out.write_text(text, encoding="utf-8")
        print(f"report      {args.out}")
    return verdict.is_one_policy


if __name__ == "__main__":
    smd_certify()
