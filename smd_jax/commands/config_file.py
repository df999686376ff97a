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
import typing
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import tyro
import yaml

from smd_jax.commands.arguments import RENAMED
from smd_jax.commands.errors import UserError
from smd_jax.commands.places import full_path, is_file
from smd_jax.commands.trl_names import in_place_of
from smd_jax.text.near_names import did_you_mean
from smd_jax.text.yaml_limits import MAX_CHARACTERS, load_yaml

ALGORITHM = "algorithm"  # the sub-command, in a file
PRESETS = "presets"  # folder of the files that --preset names
OUTPUT_DIR = "output_dir"
NAMED_VALUES = ("dataset_parameters", "chat_template_kwargs")  # lists of name=value, in a file also {name: value}
OF_A_RUN = ("metrics.jsonl", "checkpoints", "process.lock")  # files beside config.yaml in the directory of a run


def expanded(words: Sequence[str], algorithms: Mapping[str, type]) -> list[str]:
    """The words of a command line with those of its preset and its file in place of `--preset` and `--config`.

    Args:
      words: without the command's own name.
      algorithms: sub-commands and their classes of arguments.

    Raises:
      UserError: a file that cannot be read, another algorithm than the one that was named, or an unknown option.
    """
    rest, preset = taken(words, "--preset")
    rest, file = taken(rest, "--config")
    named = rest[0] if rest and rest[0] in algorithms else None
    flags = []
    chosen = named
    for source in [None if preset is None else preset_path(preset), None if file is None else Path(file)]:
        if source is None:
            continue
        options = read_options(source)
        if not any(word.partition("=")[0] == "--output-dir" for word in rest):
            check_place(source, options)
        algorithm = options.pop(ALGORITHM, None)
        if not isinstance(algorithm, str | None):
            raise UserError(f"{source}: expected {ALGORITHM!r} as a text; got {str(algorithm)[:80]!r}")
        if chosen is not None and algorithm not in (None, chosen):
            raise UserError(f"{source}: expected a configuration of {chosen!r}; got one of {algorithm!r}")
        chosen = chosen or algorithm
        if chosen is None or chosen not in algorithms:
            raise UserError(f"{source}: expected {ALGORITHM!r} to be one of {sorted(algorithms)}; got {chosen!r}")
        flags += list(as_flags(options, algorithms[chosen], str(source)))
    if chosen is None:
        return list(rest)
    return [chosen, *flags, *(rest if named is None else rest[1:])]


def with_file(words: Sequence[str], arguments: type) -> list[str]:
    """The words of a command without sub-commands, with the options of its file in place of `--config FILE`.

    Args:
      words: without the command's own name.
      arguments: class of the command's options, each a field or in a group.

    Raises:
      UserError: a file that cannot be read, or an option that the command does not have.
    """
    rest, file = taken(words, "--config")
    return rest if file is None else [*as_flags(read_options(Path(file)), arguments, file), *rest]


def taken(words: Sequence[str], flag: str) -> tuple[list[str], str | None]:
    """The words without `flag VALUE` or `flag=VALUE`, and the value; the last one where there are several."""
    rest = []
    value = None
    remaining = iter(words)
    for word in remaining:
        name, equals, after = word.partition("=")
        if name != flag:
            rest.append(word)
            continue
        value = after if equals else next(remaining, None)
        if value is None:
            raise UserError(f"expected a value behind {flag}; got none")
    return rest, value


def preset_path(name: str) -> Path:
    """The file of a preset."""
    folder = Path(str(resources.files("smd_jax.commands") / PRESETS))
    there = sorted(path.stem for path in folder.glob("*.yaml"))
    if name not in there:
        raise UserError(f"expected a preset, one of {there}; got {name!r}. A file of your own is --config FILE")
    return folder / f"{name}.yaml"


def read_options(path: Path) -> dict[str, Any]:
    """The options of a YAML file.

    Raises:
      UserError: no such file, no YAML, or no mapping of names to values.
    """
    if not is_file(path):
        raise UserError(f"expected a YAML file; found none at {str(path)[:300]}")
    try:
        size = path.stat().st_size
        if size > 4 * MAX_CHARACTERS:
            raise UserError(f"{path}: expected at most {MAX_CHARACTERS:,} characters; got {size:,} bytes")
        options = load_yaml(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise UserError(f"{path}: {error}") from error
    if not isinstance(options, dict) or not all(isinstance(name, str) for name in options):
        raise UserError(f"{path}: expected options, one `name: value` a line; got {str(options)[:80]!r}")
    older = {old: new for new, old in RENAMED.items()}
    return {older.get(str(name), str(name)): value for name, value in options.items()}


def check_place(source: Path, options: Mapping[str, Any]) -> None:
    """Raises UserError for the config.yaml of a run that names another folder than its own. A copied or moved run must
    not write into the original folder."""
    if OUTPUT_DIR not in options or not any((source.parent / name).exists() for name in OF_A_RUN):
        return
    if not isinstance(options[OUTPUT_DIR], str):
        raise UserError(f"{source}: expected {OUTPUT_DIR} as a text; got {str(options[OUTPUT_DIR])[:80]!r}")
    own, named = source.parent.resolve(), full_path(options[OUTPUT_DIR])
    if own != named:
        raise UserError(
            f"{source}: expected {OUTPUT_DIR} to be {own}, the folder of this run; got {named}: a run that was moved "
            "needs its new --output-dir"
        )


def as_flags(options: Mapping[str, Any], arguments: type, where: str) -> Iterator[str]:
    """The words that set these options.

    Raises:
      UserError: an option that the command does not have; a value that no flag can have.
    """
    kinds = options_of(arguments)
    for name, value in options.items():
        if name not in kinds:
            instead = in_place_of(name)
            if instead is not None:
                raise UserError(f"{where}: {instead}")
            hint = did_you_mean(name, kinds)
            raise UserError(f"{where}: expected an option of this command; got {name[:200]!r}{hint}")
        if value is None and type(None) not in typing.get_args(kinds[name]):
            raise UserError(f"{where}: expected a value of {name!r}; got null")
        flag = f"--{name.replace('_', '-')}"
        if name in NAMED_VALUES and isinstance(value, dict):
            value = [f"{key}={json.dumps(item)}" for key, item in value.items()]
        if name in _positionals(arguments):
            yield from (_item(item, name, where) for item in (value if isinstance(value, list) else [value]))
        elif isinstance(value, bool):
            yield flag if value else f"--no-{flag.removeprefix('--')}"
        elif isinstance(value, list) and None in value:
            raise UserError(f"{where}: expected a number, a text or a list of them in {name!r}; got a list with null")
        elif isinstance(value, list) and len(value) != 1:
            yield flag
            yield from (_item(item, name, where) for item in value)
        elif isinstance(value, list):
            yield f"{flag}={_word(value[0], name, where)}"
        else:
            # In one word, so that a value may begin with a dash.
            yield f"{flag}={_word(value, name, where)}"


def options_of(arguments: type) -> dict[str, Any]:
    """(name, type) of every option of a command or an algorithm, group by group."""
    options = {}
    for name, hint in _field_types(arguments).items():
        grouped = isinstance(hint, type) and dataclasses.is_dataclass(hint)
        options |= _field_types(hint) if grouped else {name: hint}
    return options


def _positionals(arguments: type) -> set[str]:
    """The options without a flag."""
    hints = typing.get_type_hints(arguments, include_extras=True)
    return {name for name, hint in hints.items() if tyro.conf.Positional in getattr(hint, "__metadata__", ())}


def _item(value: Any, name: str, where: str) -> str:
    word = _word(value, name, where)
    if word.startswith("-"):  # it would be taken for a flag
        raise UserError(f"{where}: expected no item that begins with a dash in a list of several; got {word!r}")
    return word


def _word(value: Any, name: str, where: str) -> str:
    if value is not None and (not isinstance(value, str | int | float) or isinstance(value, bool)):
        raise UserError(f"{where}: expected a number, a text or a list of them in {name!r}; got {str(value)[:80]!r}")
    return str(value)


def _field_types(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def dump(algorithm: str, arguments: Any) -> str:
    """The YAML of a whole configuration, group by group."""
    parts = [yaml.safe_dump({ALGORITHM: algorithm})]
    for group in vars(arguments).values():
        parts.append(f"\n# {(type(group).__doc__ or '').strip()}\n{yaml.safe_dump(_values(group), sort_keys=False)}")
    return "".join(parts)


def options(algorithm: str, arguments: Any) -> dict[str, Any]:
    """What `dump` writes, as one mapping."""
    groups = [_values(group) for group in vars(arguments).values()]
    return {ALGORITHM: algorithm} | {name: value for group in groups for name, value in group.items()}


def _values(group: Any) -> dict[str, Any]:
    return {name: _plain(value) for name, value in vars(group).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value
