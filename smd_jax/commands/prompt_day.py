"""The day that a run's prompts are of, where the chat template reads the date: kept with the run's options."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import replace

from smd_jax.commands.arguments import Common
from smd_jax.commands.config_file import read_options
from smd_jax.commands.model_source import load_tokenizer, model_directory
from smd_jax.text.chat_template import DAY, reads_day


def with_prompt_day(args: Common) -> Common:
    """The arguments with `--chat-template-kwargs strftime_now=DAY`, where the template reads it and no flag says it:
    today, or with --resume the day that the run began with."""
    given = args.data.chat_template_kwargs
    if args.data.chat_template == "none" or _days(given):
        return args
    kept = args.run.output_dir / "config.yaml"
    if args.run.resume:
        options = read_options(kept).get("chat_template_kwargs")
        days = _days(options if isinstance(options, list) else [])
    else:
        named = args.model
        directory = model_directory(named.model, named.model_revision)
        template = load_tokenizer(directory, named.tokenizer, named.tokenizer_revision).chat_template
        days = [f"{DAY}={datetime.date.today().isoformat()}"] if reads_day(str(template or "")) else []
    return replace(args, data=replace(args.data, chat_template_kwargs=(*given, *days[:1])))


def _days(given: Sequence[object]) -> list[str]:
    return [str(text) for text in given if str(text).partition("=")[0] == DAY]
