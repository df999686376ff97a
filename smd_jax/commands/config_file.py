"""Reads the options of every command from YAML: `--config FILE`, and `--preset NAME` of smd-train.

    algorithm: grpo
    learning_rate: 1.0e-5
    stop: ["</answer>"]

The options become flags before those of the user, so that types, defaults and errors are those of the command line.
`config.yaml` in the directory of a run names every option, and starts the run again.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import tyro
import yaml

from smd_jax.commands.errors import UserError
from smd_jax.commands.places import full_path
from smd_jax.runs.lock import LOCK
from smd_jax.text.near_names import did_you_mean, nearest_file
from smd_jax.text.yaml_limits import MAX_CHARACTERS, load_yaml

ALGORITHM = "algorithm"  # the sub-command, in a file
OUTPUT_DIR = "output_dir"
NAMED_VALUES = ("dataset_parameters", "chat_template_kwargs")  # lists of name=value, in a file also {name: value}
RETIRED = ("debug",)  # options in config.yaml of older runs that no command reads any more
LIKE_A_FLAG = re.compile(r"--?[^\W\d]|--\Z")  # values that the parser takes for flags
MOST_CHARACTERS = 10 * MAX_CHARACTERS  # of a file: `dump` writes a character outside of ASCII in up to ten
RUN_CONFIG, RUN_FILES = "config.yaml", ("metrics.jsonl", "checkpoints", LOCK)  # in the directory of a run


def expand_words(words: Sequence[str], algorithms: Mapping[str, type]) -> list[str]:
    """Replaces `--preset` and `--config` on the command line of a command whose sub-commands are `algorithms`.

    Raises UserError for a file that cannot be read, another algorithm than the named one, or an unknown option.
    """
    rest, preset = take_option(words, "--preset")
    rest, file = take_option(rest, "--config")
    sources = [*([] if preset is None else [preset_path(preset)]), *([] if file is None else [Path(file)])]
    chosen = rest.pop(0) if rest and rest[0] in algorithms else None
    flags = list[str]()
    for source in sources:
        options = read_options(source)
        if not any(word.partition("=")[0].replace("_", "-") == "--output-dir" for word in rest):
            check_output_dir(source, options.get(OUTPUT_DIR))
        algorithm = options.pop(ALGORITHM, chosen)
        if algorithm not in [*algorithms] or chosen not in (None, algorithm):
            wanted = [*algorithms] if chosen is None else chosen
            raise UserError(f"{source}: expected {ALGORITHM!r} as {wanted}; got {str(algorithm)[:80]!r}")
        chosen = str(algorithm)
        flags += as_flags(options, algorithms[chosen], str(source))
    if chosen is not None:
        check_once(rest, algorithms[chosen])
    return [*([] if chosen is None else [chosen]), *flags, *rest]


def with_file(words: Sequence[str], arguments: type) -> list[str]:
    """Replaces `--config FILE` on the command line of a command without sub-commands. `arguments` is the class of the
    command's options, each a field or in a group. Raises UserError as `read_options` and `as_flags`."""
    rest, file = take_option(words, "--config")
    check_once(rest, arguments)
    return rest if file is None else [*as_flags(read_options(Path(file)), arguments, file), *rest]


def check_once(words: Sequence[str], arguments: type) -> None:
    """Raises UserError for a flag of several values that the user gives twice: only the last values would count. A last
    flag without values removes those before it."""
    flags = [f"--{name.replace('_', '-')}" for name, kind in options_of(arguments).items() if _takes_several(kind)]
    for flag in flags:
        places = [place for place, word in enumerate(words) if word.partition("=")[0].replace("_", "-") == flag]
        if len(places) < 2:
            continue
        behind = [*words[places[-1] + 1 :], "--"][0]
        if "=" in words[places[-1]] or not behind.startswith("--"):
            raise UserError(f"expected {flag} once, with all its values after it; got it {len(places)} times")


def _takes_several(kind: Any) -> bool:
    return typing.get_origin(kind.__origin__ if hasattr(kind, "__metadata__") else kind) is tuple


def take_option(words: Sequence[str], flag: str) -> tuple[list[str], str | None]:
    """The words without `flag VALUE` or `flag=VALUE`, and the value; the last one if there are several."""
    rest = list[str]()
    value = None
    remaining = iter(words)
    for word in remaining:
        name, equals, after = word.partition("=")
        if name != flag:
            rest.append(word)
            continue
        value = after if equals else next(remaining, None)
        if value is None:
            raise UserError(f"expected a value after {flag}; got none")
    return rest, value


def preset_path(name: str) -> Path:
    """The file of a preset."""
    folder = Path(str(resources.files("smd_jax.commands") / "presets"))
    there = sorted(path.stem for path in folder.glob("*.yaml"))
    if name not in there:
        raise UserError(f"expected a preset, one of {there}; got {name!r}. For your own file use --config FILE")
    return folder / f"{name}.yaml"


def read_options(path: Path) -> dict[str, Any]:
    """The options of a YAML file. Raises UserError for no file, no YAML, or no mapping of names to values."""
    if not os.path.isfile(path):
        raise UserError(f"expected a YAML file; found none at {str(path)[:300]}{nearest_file(path)}")
    try:
        size = path.stat().st_size
        if size > 4 * MOST_CHARACTERS:
            raise UserError(f"{path}: expected at most {MOST_CHARACTERS:,} characters; got {size:,} bytes")
        text = path.read_text(encoding="utf-8")
        options = load_yaml(text, MOST_CHARACTERS)
    except (ValueError, OSError) as error:
        raise UserError(f"{path}: {error}") from error
    if not isinstance(options, dict) or not all(isinstance(name, str) for name in options):
        raise UserError(f"{path}: expected options, one `name: value` a line; got {str(options)[:80]!r}")
    return options


def check_output_dir(source: Path, output_dir: Any) -> None:
    """Raises UserError for the config.yaml of a run that names another folder than its own. A copied or moved run must
    not write into the original folder."""
    is_of_run = source.name == RUN_CONFIG and any((source.parent / name).exists() for name in RUN_FILES)
    if not isinstance(output_dir, str) or not is_of_run:
        return
    own, named = source.parent.resolve(), full_path(output_dir)
    if own != named:
        raise UserError(
            f"{source}: expected {OUTPUT_DIR} to be {own}, the folder of this run; got {named}: a run that was moved "
            "needs its new --output-dir"
        )


def as_flags(options: Mapping[str, Any], arguments: type, where: str) -> Iterator[str]:
    """The words that set these options. Raises UserError for an unknown option, or a value that no flag can have."""
    kinds = options_of(arguments)
    for name, value in options.items():
        if name in RETIRED:
            continue
        if name not in kinds:
            near = did_you_mean(name, kinds)
            raise UserError(f"{where}: expected an option of this command; got {name[:200]!r}{near}")
        flag, metadata = f"--{name.replace('_', '-')}", getattr(kinds[name], "__metadata__", ())
        kind = kinds[name].__origin__ if metadata else kinds[name]
        if value is None and type(None) not in typing.get_args(kind):
            raise UserError(f"{where}: expected a value of {name!r}; got null")
        if isinstance(value, dict) and name in NAMED_VALUES:
            value = [f"{key}={json.dumps(item)}" for key, item in value.items()]
        takes_bool = kind is bool or bool in typing.get_args(kind)
        if isinstance(value, bool) and not takes_bool or kind is bool and not isinstance(value, bool):
            wanted = "true or false" if takes_bool else "a number or a text"
            raise UserError(f"{where}: expected {wanted} in {name!r}; got {str(value)[:80]!r}")
        if isinstance(value, list) and typing.get_origin(kind) is not tuple:
            raise UserError(f"{where}: expected one value in {name!r}; got a list, {str(value)[:80]}")
        if isinstance(value, bool):
            negated = f"--no-{flag.removeprefix('--')}"
            yield (flag if value else negated) if kind is bool else f"{flag}={value}"  # a `bool | None` has a value
            continue
        items = value if isinstance(value, list) else ["None" if value is None else value]
        if not all(isinstance(item, str | int | float) and not isinstance(item, bool) for item in items):
            raise UserError(
                f"{where}: expected a number, a text or a list of them in {name!r}; got {str(value)[:80]!r}"
            )
        if len(items) > 1 and (flags := [item for item in items if isinstance(item, str) and LIKE_A_FLAG.match(item)]):
            raise UserError(f"{where}: expected several values in {name!r} that are no flags; got {flags!r:.80}")
        if tyro.conf.Positional in metadata:
            yield from map(str, items)
        elif len(items) == 1:
            yield f"{flag}={items[0]}"  # in one word, so that a value may begin with a dash
        else:
            yield from (flag, *map(str, items))


def options_of(arguments: type) -> dict[str, Any]:
    """Name -> annotation of every option of a command or an algorithm, group by group."""
    options = dict[str, Any]()
    for name, hint in typing.get_type_hints(arguments, include_extras=True).items():
        is_group = isinstance(hint, type) and dataclasses.is_dataclass(hint)
        options |= options_of(hint) if is_group else {name: hint}
    return options


def dump(algorithm: str, arguments: Any) -> str:
    """The YAML of a whole configuration, group by group. Raises ValueError for options that `read_options` could not
    read back: too many characters, or text that is not Unicode."""
    parts = [yaml.safe_dump({ALGORITHM: algorithm})]
    for group in vars(arguments).values():
        values = {name: str(value) if isinstance(value, Path) else value for name, value in vars(group).items()}
        parts.append(f"\n# {(type(group).__doc__ or '').strip()}\n{yaml.safe_dump(values, sort_keys=False)}")
    text = "".join(parts)
    try:
        load_yaml(text, MOST_CHARACTERS)
    except ValueError as error:
        raise ValueError(f"expected options that {RUN_CONFIG} can hold, as text in UTF-8; {error}") from error
    return text
