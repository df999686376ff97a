"""Where a model and its tokenizer come from: a directory in Hugging Face's format, or the Hub."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from smd_jax.commands.arguments import TemplateName
from smd_jax.commands.errors import UserError
from smd_jax.text.hugging_face import AutoTokenizer, snapshot_download
from smd_jax.text.prompts import eos_token_id
from smd_jax.text.visible_text import visible

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# Weights of other formats are neither read nor fetched.
TOKENIZER_FILES = ["*.json", "*.model", "*.txt", "*.jinja"]
FILES = [*TOKENIZER_FILES, "*.safetensors"]


def model_directory(name: str, revision: str | None = None) -> Path:
    """The directory of a model, fetched if the name is an id on the Hub and no such directory is here.

    Args:
      revision: branch, tag or commit on the Hub; None: its main branch.

    Raises:
      UserError: neither a directory with a config.json nor an id that the Hub has; a directory with a revision.
    """
    directory = local_directory(name, "--model", FILES, revision)
    if not (directory / "config.json").is_file():
        found = sorted(file.name for file in directory.iterdir())[:8]
        raise UserError(f"--model: expected a checkpoint directory with a config.json; got {directory} with {found}")
    return directory


def local_directory(name: str, flag: str, files: list[str], revision: str | None = None) -> Path:
    """The directory of this name, or what the Hub has of it.

    Args:
      flag: that gave the name, for the message.
      files: patterns of what is fetched.
      revision: of an id, as `model_directory`.

    Raises:
      UserError: neither a directory nor an id that the Hub has; a directory with a revision.
    """
    path = Path(name)
    if path.is_dir():
        if revision is not None:
            raise UserError(f"expected no {flag}-revision with {flag} {name}, a directory here; got {revision!r}")
        return path
    if path.is_absolute() or name.startswith(".") or not HUB_ID.fullmatch(name):
        raise UserError(
            f"{flag}: expected a checkpoint directory in Hugging Face's format, or an id on the Hub such as "
            f"Qwen/Qwen2.5-0.5B-Instruct; got {name!r}, which is neither"
        )
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=files))
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:
        of_revision = "" if revision is None else f" at {flag}-revision {revision}"
        raise UserError(
            f"{flag}: expected a directory or a model on the Hub; there is no directory {name!r} here, and the Hub "
            f"does not give a model of that name{of_revision}: {str(error).splitlines()[0]}"
        ) from error


def load_tokenizer(model: Path, name: str | None = None, revision: str | None = None) -> Any:
    """The tokenizer of a model; without a padding token it pads with the one that ends a text.

    Args:
      model: its directory.
      name: a directory or an id on the Hub that has the tokenizer; None: the model's directory.
      revision: of that id, as `model_directory`.

    Raises:
      UserError: no tokenizer there; a revision without an id.
    """
    if name is None and revision is not None:
        raise UserError(f"expected --tokenizer, an id on the Hub, with --tokenizer-revision; got {revision!r} alone")
    directory = model if name is None else local_directory(name, "--tokenizer", TOKENIZER_FILES, revision)
    files = ("tokenizer.json", "tokenizer.model", "vocab.json")
    if not any((directory / file).is_file() for file in files):
        said = f"expected a tokenizer, one of {list(files)}, in {directory}; found none"
        mended = "--tokenizer names another directory, or an id on the Hub"
        raise UserError(f"--model: {said}. {mended}" if name is None else f"--tokenizer: {said}")
    try:
        # Said, because without it transformers would ask the person at the terminal.
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except ValueError as error:
        raise UserError(
            f"expected a tokenizer in {directory} that transformers can read without code of its own; {error}"
        ) from error
    if tokenizer.pad_token is None:
        # Padding is told from tokens by a mask and never by its id, so that any id will do.
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def with_template(tokenizer: Any, template: TemplateName) -> Any:
    """The tokenizer that makes prompts of rows; with "none" it has no chat template, and takes text as it is."""
    if template == "auto":
        return tokenizer
    plain = copy.copy(tokenizer)  # what is exported keeps the template
    plain.chat_template = None
    return plain


def check_template_kwargs(tokenizer: Any, names: Sequence[str]) -> None:
    """Raises UserError for --chat-template-kwargs that the chat template does not read: they would do nothing."""
    template = str(tokenizer.chat_template or "")
    unread = [name for name in names if not re.search(rf"\b{re.escape(name)}\b", template)]
    if unread:
        said = f"expected --chat-template-kwargs that the model's chat template reads; got {unread}"
        raise UserError(said if template else f"{said}, and a tokenizer without a chat template")


def end_token_ids(model: Path, tokenizer: Any, named: Sequence[str]) -> tuple[int, ...]:
    """The tokens that end a completion, ascending: those that are named, or else the tokenizer's and those of
    generation_config.json, which lists what a chat model ends its turns with. With one of them missing, the sampler
    would go on behind the end of a turn.

    Args:
      model: its directory, which may have a generation_config.json.
      named: tokens as the tokenizer writes them, such as "<|im_end|>".

    Raises:
      UserError: a name that is no token of the tokenizer; a generation_config.json that cannot be read.
      ValueError: none named, and a tokenizer without one.
    """
    if named:
        vocabulary = tokenizer.get_vocab()
        unknown = [token for token in named if token not in vocabulary]
        if unknown:
            there = [*map(str, tokenizer.added_tokens_decoder.values())][:16]
            raise UserError(
                f"expected --eos-token as tokens of the tokenizer, whose special ones are {there}; got {unknown}"
            )
        return tuple(sorted({vocabulary[token] for token in named}))
    return tuple(sorted({eos_token_id(tokenizer), *_generation_ends(model / "generation_config.json")}))


def _generation_ends(file: Path) -> list[int]:
    """`eos_token_id` of a generation_config.json, which is an id, a list of them, null or left out."""
    if not file.is_file():
        return []
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"expected JSON in {file}; {error}") from error
    found = config.get("eos_token_id") if isinstance(config, dict) else config
    ids = found if isinstance(found, list) else [] if found is None else [found]
    # True and False would pass for 1 and 0.
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise UserError(f"expected eos_token_id in {file} as an id, or a list of ids; got {found!r:.80}")
    return ids


def shown_tokens(tokenizer: Any, ids: Sequence[int]) -> str:
    """Tokens with their ids, for the plan."""
    return ", ".join(f"{visible(str(tokenizer.convert_ids_to_tokens(token)))} ({token})" for token in ids)
