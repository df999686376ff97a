"""Opens a model and its tokenizer, from a directory in Hugging Face's format or from the Hub; saves a trained one."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from smd_jax.commands.arguments import DataArgs, ModelSource, SamplingArgs
from smd_jax.commands.errors import UserError
from smd_jax.commands.task_source import parameters_of
from smd_jax.config import ModelConfig
from smd_jax.message.gate import drop_gate
from smd_jax.model.hf_config import LARGEST
from smd_jax.model.lora import merge_lora
from smd_jax.model.protocol import Params
from smd_jax.model.stored_tensors import INDEX_FILE, SINGLE_FILE, read_json, shard_names
from smd_jax.model.tokenizer_files import GENERATION, token_ids
from smd_jax.model.weights import read_config, save_checkpoint
from smd_jax.tasks.reward_calls import Caught
from smd_jax.tasks.sources import HUB_ID
from smd_jax.text.hugging_face import snapshot_download
from smd_jax.text.near_names import nearest_file
from smd_jax.text.prompts import eos_token_id, pad_token_id
from smd_jax.text.stop_strings import stop_table
from smd_jax.text.tokenizer_file import open_tokenizer
from smd_jax.text.visible_text import one_line, visible

FILES = ["*.json", "*.model", "*.txt", "*.jinja"]  # all but the weights
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")  # one of them is a tokenizer


class OpenedModel(NamedTuple):
    """A model without its weights.

    Attributes:
      tokenizer: turns rows into prompts.
      exported_tokenizer: saved with the trained model; None copies the model's own files.
      ends: ids of the tokens that end a completion.
    """

    directory: Path
    config: ModelConfig
    tokenizer: Any
    exported_tokenizer: Any
    ends: tuple[int, ...]


def open_model(source: ModelSource, data: DataArgs, sampler: SamplingArgs) -> OpenedModel:
    """Opens the model that the options name, without its weights.

    Raises UserError, ValueError or OSError for a missing, unreadable or unusable model or tokenizer, a stop string that
    no token can end, or a variable that the chat template does not read.
    """
    directory = model_directory(source.model, source.model_revision)
    dtype = source.dtype
    if dtype == "auto":
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    config = read_config(directory, dtype)
    own = load_tokenizer(directory, source.tokenizer, source.tokenizer_revision)
    tokenizer = own
    # On copies, because the export keeps the padding and the template.
    if pad_token_id(tokenizer) >= config.vocab_size:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    if data.chat_template == "none":
        tokenizer = copy.copy(tokenizer)
        tokenizer.chat_template = None
    template = str(tokenizer.chat_template or "")
    names = [name for name, _ in parameters_of("--chat-template-kwargs", data.chat_template_kwargs)]
    unread = [name for name in names if not re.search(rf"\b{re.escape(name)}\b", template)]
    if unread:
        problem = f"expected --chat-template-kwargs that the model's chat template reads; got {unread}"
        raise UserError(problem if template else f"{problem}, and a tokenizer without a chat template")
    ends = end_token_ids(directory, tokenizer, sampler.eos_token, config.vocab_size)
    # Built here so that an invalid stop string fails before the first rollout.
    stop_table(tokenizer, sampler.stop, config.vocab_size)
    return OpenedModel(directory, config, tokenizer, tokenizer_to_export(own, source.tokenizer is None, ends), ends)


def model_directory(name: str, revision: str | None = None) -> Path:
    """The directory of a model. Downloads a model of the Hub with its weights. Raises UserError as `local_directory`,
    and for a directory without a config.json."""
    directory = local_directory(name, "--model", revision, FILES)
    if not Path(name).is_dir():  # then its weights, as transformers chooses them
        index = directory / INDEX_FILE
        weights = shard_names(index) if index.is_file() else [SINGLE_FILE]
        directory = local_directory(name, "--model", revision, [*FILES, *weights])
    if not (directory / "config.json").is_file():
        names = sorted(file.name for file in directory.iterdir())[:8]
        raise UserError(f"--model: expected a checkpoint directory with a config.json; got {directory} with {names}")
    return directory


def local_directory(name: str, flag: str, revision: str | None, files: Sequence[str]) -> Path:
    """The local directory of this name, or the downloaded files of a repository that match these patterns.

    `flag` is the option that gave the name, `revision` a branch, tag or commit on the Hub (None: the main branch).
    Raises UserError for neither a directory nor a repository on the Hub, and for a revision of a local directory.
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
        return Path(snapshot_download(name, revision=revision, allow_patterns=[*files]))
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:
        of_revision = "" if revision is None else f" at {flag}-revision {revision}"
        raise UserError(
            f"{flag}: expected a directory or a model on the Hub; got {name!r}{of_revision}, which is no directory "
            f"here and could not be downloaded: {str(error).splitlines()[0]}{nearest_file(name)}"
        ) from error


def has_tokenizer(directory: Path) -> bool:
    """Whether a directory has the files of a tokenizer."""
    return any((directory / file).is_file() for file in TOKENIZER_FILES)


def load_tokenizer(model: Path, name: str | None = None, revision: str | None = None) -> Any:
    """Loads the tokenizer of a model.

    Its name and revision are as in `local_directory`; None is the model's directory. A missing EOS or padding token is
    taken from the model's generation_config.json or config.json. If no file names a padding token, EOS is used. Raises
    UserError for no tokenizer, one that transformers cannot read, or a revision without an id.
    """
    if name is None and revision is not None:
        raise UserError(f"expected --tokenizer, an id on the Hub, with --tokenizer-revision {revision!r}; got none")
    directory = model if name is None else local_directory(name, "--tokenizer", revision, FILES)
    if not has_tokenizer(directory):
        problem = f"expected a tokenizer, one of {list(TOKENIZER_FILES)}, in {directory}; found none"
        hint = "--tokenizer names another directory, or an id on the Hub"
        raise UserError(f"--model: {problem}. {hint}" if name is None else f"--tokenizer: {problem}")
    tokenizer = None
    # transformers and tokenizers raise any type of exception for files that they cannot parse, even plain Exception.
    with Caught() as caught:
        tokenizer = open_tokenizer(directory)
        tokenizer.encode("a", add_special_tokens=True)  # some load but cannot encode
    if tokenizer is None or caught.error is not None:
        raise UserError(
            f"expected a tokenizer in {directory} that transformers can read without running its code; got "
            f"{type(caught.error).__name__}: {one_line(str(caught.error), 300)}"
        ) from caught.error
    for kind in ("eos_token", "pad_token"):
        if getattr(tokenizer, kind) is None:
            tokens = [tokenizer.convert_ids_to_tokens(token) for token in named_ids(model, f"{kind}_id")]
            setattr(tokenizer, kind, next((token for token in tokens if token is not None), None))
    if tokenizer.pad_token is None:
        # Any token will do: a mask marks the padding, not its id.
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def end_token_ids(model: Path, tokenizer: Any, named: Sequence[str], vocab_size: int | None = None) -> tuple[int, ...]:
    """Ids of the tokens that end a completion: the named ones in their order, or those of tokenizer and model, sorted.

    The model's come from generation_config.json, which lists the tokens that end a chat turn, or from config.json.
    If one is missing, the sampler continues past the end of a turn.

    Named tokens are as the tokenizer writes them, such as "<|im_end|>". Those without one of the embedding's
    `vocab_size` rows are left out, as they cannot be sampled. Raises UserError or ValueError for an unknown token, an
    unreadable file, or no token that ends a completion.
    """
    reachable = LARGEST if vocab_size is None else vocab_size
    if named:
        vocabulary = tokenizer.get_vocab()
        unknown = [token for token in named if vocabulary.get(token, reachable) >= reachable]
        if unknown:
            special = [*map(str, tokenizer.added_tokens_decoder.values())][:16]
            raise UserError(
                f"expected --eos-token as tokens of the tokenizer, whose special tokens are {special}; got {unknown}"
            )
        return tuple(dict.fromkeys(vocabulary[token] for token in named))
    own = [] if tokenizer.eos_token is None else [eos_token_id(tokenizer)]
    ids = {*own, *named_ids(model, "eos_token_id")}
    ends = tuple(sorted(token for token in ids if token < reachable))
    if not ends:
        received = f"ids {sorted(ids)}, and an embedding of {vocab_size} rows" if ids else "none"
        raise UserError(
            f"expected a token that ends a completion, from the tokenizer, {GENERATION} or config.json in {model}; got "
            f"{received}. Name one with --eos-token"
        )
    return ends


def named_ids(model: Path, key: str) -> list[int]:
    """Ids of `eos_token_id` or `pad_token_id` in generation_config.json, or else in config.json; ValueError for a file
    that cannot be read."""
    for file in (model / GENERATION, model / "config.json"):
        if file.is_file() and (ids := token_ids(read_json(file), key, file)):
            return ids
    return []


def tokenizer_to_export(tokenizer: Any, is_models_own: bool, ends: Sequence[int]) -> Any:
    """The tokenizer to save with the trained weights, or None to copy the model's files.

    Engines such as vLLM also stop at the tokenizer's EOS token. If that token did not end completions in training, the
    exported tokenizer gets another EOS, unless the chat template writes EOS into prompts.
    """
    eos = None if tokenizer.eos_token is None else eos_token_id(tokenizer)
    if eos is None or eos in ends or "eos_token" in str(tokenizer.chat_template):
        return None if is_models_own else tokenizer
    changed = copy.deepcopy(tokenizer)
    changed.eos_token = tokenizer.convert_ids_to_tokens(ends[0])
    return changed


def save_model(out: Path, params: Params, opened: OpenedModel, dtype: Literal["float32", "bfloat16"]) -> None:
    """Writes a model in Hugging Face's format, with merged adapters."""
    save_checkpoint(
        out,
        jax.device_get(merge_lora(drop_gate(params))),
        opened.config,
        dtype=dtype,
        tokenizer_from=opened.directory,
        tokenizer=opened.exported_tokenizer,
        end_token_ids=opened.ends,
    )


def shown_tokens(tokenizer: Any, ids: Sequence[int]) -> str:
    """Formats tokens with their ids, for the plan."""
    return ", ".join(f"{visible(str(tokenizer.convert_ids_to_tokens(token)))} ({token})" for token in ids)
