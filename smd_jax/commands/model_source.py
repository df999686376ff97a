"""Where a model and its tokenizer come from: a directory in Hugging Face's format, or the Hub."""

from __future__ import annotations

import copy
import glob
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from smd_jax.commands.arguments import ModelSource, SamplingArgs, TemplateName
from smd_jax.commands.errors import UserError
from smd_jax.config import FloatName, ModelConfig
from smd_jax.model.hf_fields import LARGEST, shown
from smd_jax.model.stored_tensors import INDEX_FILE, SINGLE_FILE, read_json, shard_names
from smd_jax.model.tokenizer_files import GENERATION, token_ids
from smd_jax.model.weights import read_config
from smd_jax.tasks.reward_calls import Caught
from smd_jax.text.hugging_face import AutoTokenizer, snapshot_download
from smd_jax.text.near_names import nearest_file
from smd_jax.text.prompts import eos_token_id, pad_token_id
from smd_jax.text.stop_strings import stop_table
from smd_jax.text.visible_text import one_line, visible

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# Everything but weights.
FILES = ["*.json", "*.model", "*.txt", "*.jinja"]


class OpenedModel(NamedTuple):
    """A model whose weights are not read yet.

    Attributes:
      own_tokenizer: as it was loaded, for the export.
      tokenizer: makes prompts of rows.
      ends: tokens that end a completion.
    """

    directory: Path
    config: ModelConfig
    own_tokenizer: Any
    tokenizer: Any
    ends: tuple[int, ...]


def open_model(source: ModelSource, template: TemplateName, sampler: SamplingArgs) -> OpenedModel:
    """The model that the options name, without its weights.

    Raises:
      UserError, ValueError, OSError: no such model or tokenizer, or one that cannot be read or used; a stop string that
        the tokenizer cannot end with.
    """
    directory = model_directory(source.model, source.model_revision)
    config = read_config(directory, compute_dtype(source.dtype))
    own = load_tokenizer(directory, source.tokenizer, source.tokenizer_revision)
    tokenizer = with_template(with_reachable_padding(own, config.vocab_size), template)
    ends = end_token_ids(directory, tokenizer, sampler.eos_token, config.vocab_size)
    # Built here so that its errors come before the first rollout.
    stop_table(tokenizer, sampler.stop, config.vocab_size)
    return OpenedModel(directory, config, own, tokenizer, ends)


def compute_dtype(name: str) -> FloatName:
    """ "auto" is what the platform is fast in."""
    if name == "auto":
        return "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return "float32" if name == "float32" else "bfloat16"


def model_directory(name: str, revision: str | None = None) -> Path:
    """The directory of a model, fetched if the name is an id on the Hub and no such directory is here.

    Args:
      revision: branch, tag or commit on the Hub; None: its main branch.

    Raises:
      UserError: neither a directory with a config.json nor an id that the Hub has; a directory with a revision.
    """
    directory = local_directory(name, "--model", revision, weights=True)
    if not (directory / "config.json").is_file():
        found = sorted(file.name for file in directory.iterdir())[:8]
        raise UserError(f"--model: expected a checkpoint directory with a config.json; got {directory} with {found}")
    return directory


def local_directory(name: str, flag: str, revision: str | None = None, *, weights: bool = False) -> Path:
    """The directory of this name, or what the Hub has of it.

    Args:
      flag: that gave the name, for the message.
      revision: of an id, as `model_directory`.
      weights: fetch them, too.

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
            f"Qwen/Qwen2.5-0.5B-Instruct; got {name[:200]!r}, which is neither{nearest_file(name)}"
        )
    try:
        directory = Path(snapshot_download(name, revision=revision, allow_patterns=FILES))
        return _with_weights(name, directory, revision) if weights else directory
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:
        of_revision = "" if revision is None else f" at {flag}-revision {revision}"
        raise UserError(
            f"{flag}: expected a directory or a model on the Hub; there is no directory {name!r} here, and the Hub "
            f"does not give a model of that name{of_revision}: {str(error).splitlines()[0]}{nearest_file(name)}"
        ) from error


def _with_weights(name: str, directory: Path, revision: str | None) -> Path:
    """Fetches the weights that `load_checkpoint` reads, into the snapshot of a repository, and no other copy of them.

    Raises:
      UserError: an index that cannot be read.
    """
    # The commit of the other files, even if the branch moves meanwhile.
    commit = directory.name if directory.parent.name == "snapshots" else revision
    directory = Path(snapshot_download(name, revision=commit, allow_patterns=[SINGLE_FILE]))
    index = directory / INDEX_FILE
    if (directory / SINGLE_FILE).is_file() or not index.is_file():
        return directory
    try:
        shards = [glob.escape(shard) for shard in shard_names(index)]
    except ValueError as error:
        raise UserError(str(error)) from error
    return Path(snapshot_download(name, revision=commit, allow_patterns=shards))


def load_tokenizer(model: Path, name: str | None = None, revision: str | None = None) -> Any:
    """The tokenizer of a model.

    Without an EOS token of its own it has the first that the model's generation_config.json or config.json names, and
    without a padding token the one named there, or EOS.

    Args:
      model: its directory.
      name: a directory or an id on the Hub that has the tokenizer; None: the model's directory.
      revision: of that id, as `model_directory`.

    Raises:
      UserError: no tokenizer there, or one that transformers cannot read; a revision without an id.
    """
    if name is None and revision is not None:
        raise UserError(f"expected --tokenizer, an id on the Hub, with --tokenizer-revision; got {revision!r} alone")
    directory = model if name is None else local_directory(name, "--tokenizer", revision)
    files = ("tokenizer.json", "tokenizer.model", "vocab.json")
    if not any((directory / file).is_file() for file in files):
        said = f"expected a tokenizer, one of {list(files)}, in {directory}; found none"
        mended = "--tokenizer names another directory, or an id on the Hub"
        raise UserError(f"--model: {said}. {mended}" if name is None else f"--tokenizer: {said}")
    tokenizer = None
    # transformers and tokenizers raise errors of any type for files that they cannot parse, even plain Exception.
    with Caught() as caught:
        # Explicit, because transformers would otherwise ask at the terminal.
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
        _check_tokenizer(tokenizer)
    if tokenizer is None or caught.error is not None:
        raise UserError(
            f"expected a tokenizer in {directory} that transformers can read without code of its own; got "
            f"{type(caught.error).__name__}: {one_line(str(caught.error), 300)}"
        ) from caught.error
    for kind in ("eos_token", "pad_token"):
        if getattr(tokenizer, kind) is None:
            tokens = [tokenizer.convert_ids_to_tokens(token) for token in named_ids(model, f"{kind}_id")]
            setattr(tokenizer, kind, next((token for token in tokens if token is not None), None))
    if tokenizer.pad_token is None:
        # Padding is told from tokens by a mask and never by its id, so that any token will do.
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def _check_tokenizer(tokenizer: Any) -> None:
    """Raises errors of any type for a tokenizer that transformers opens, and that cannot be used."""
    tokenizer.encode("a", add_special_tokens=True)
    template = tokenizer.chat_template
    texts = template.values() if isinstance(template, dict) else [] if template is None else [template]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"expected a chat_template as a text, or several by name; got {shown(template)}")
    if not tokenizer.get_vocab():
        raise ValueError("expected a vocabulary with tokens; got none")


def with_reachable_padding(tokenizer: Any, vocab_size: int) -> Any:
    """The tokenizer with a padding token that the embedding has: one that was added without a row is replaced."""
    if pad_token_id(tokenizer) < vocab_size:
        return tokenizer
    changed = copy.deepcopy(tokenizer)
    changed.pad_token = tokenizer.convert_ids_to_tokens(0)
    return changed


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


def end_token_ids(model: Path, tokenizer: Any, named: Sequence[str], vocab_size: int | None = None) -> tuple[int, ...]:
    """The tokens that end a completion, ascending: the named ones, or else the tokenizer's and the model's.

    The model's are those of generation_config.json, which lists what a chat model ends its turns with, or of
    config.json. With one of them missing, the sampler would go on behind the end of a turn.

    Args:
      model: its directory.
      named: tokens as the tokenizer writes them, such as "<|im_end|>".
      vocab_size: rows of the embedding; tokens without a row cannot be sampled, and are left out. None: not known.

    Raises:
      UserError: a name that is no token of the tokenizer; a file that cannot be read; no token that ends a completion.
    """
    reachable = LARGEST if vocab_size is None else vocab_size
    if named:
        vocabulary = tokenizer.get_vocab()
        unknown = [token for token in named if vocabulary.get(token, reachable) >= reachable]
        if unknown:
            there = [*map(str, tokenizer.added_tokens_decoder.values())][:16]
            raise UserError(
                f"expected --eos-token as tokens of the tokenizer, whose special ones are {there}; got {unknown}"
            )
        return tuple(sorted({vocabulary[token] for token in named}))
    own = [] if tokenizer.eos_token is None else [eos_token_id(tokenizer)]
    found = {*own, *named_ids(model, "eos_token_id")}
    ends = tuple(sorted(token for token in found if token < reachable))
    if not ends:
        there = f"ids {sorted(found)}, and an embedding of {vocab_size} rows" if found else "none"
        raise UserError(
            f"expected a token that ends a completion, from the tokenizer, {GENERATION} or config.json in {model}; got "
            f"{there}. Name one with --eos-token"
        )
    return ends


def named_ids(model: Path, key: str) -> list[int]:
    """The ids under `eos_token_id` or `pad_token_id` in generation_config.json, or else in config.json.

    Raises:
      UserError: a file that cannot be read.
    """
    for file in (model / GENERATION, model / "config.json"):
        if not file.is_file():
            continue
        try:
            ids = token_ids(read_json(file), key, file)
        except ValueError as error:
            raise UserError(str(error)) from error
        if ids:
            return ids
    return []


def tokenizer_to_export(tokenizer: Any, is_models_own: bool, ends: Sequence[int]) -> Any:
    """The tokenizer to write beside the trained weights, or None to copy the files of the model.

    Readers such as vLLM stop at the tokenizer's EOS token, too. If no completion ended there in training, the exported
    tokenizer has another one, unless the chat template writes EOS into prompts.
    """
    eos = None if tokenizer.eos_token is None else eos_token_id(tokenizer)
    if eos is None or eos in ends or "eos_token" in str(tokenizer.chat_template):
        return None if is_models_own else tokenizer
    changed = copy.deepcopy(tokenizer)
    changed.eos_token = tokenizer.convert_ids_to_tokens(ends[0])
    return changed


def shown_tokens(tokenizer: Any, ids: Sequence[int]) -> str:
    """Tokens with their ids, for the plan."""
    return ", ".join(f"{visible(str(tokenizer.convert_ids_to_tokens(token)))} ({token})" for token in ids)
