"""The configuration of a deployment: one TOML file, overridden by the environment.

Only `load_config` reads it. An empty file, or none, gives the local demo. An environment variable
PACELINE_SECTION__KEY overrides a key (PACELINE_DRAFTERS__0__COUNT a key of the first drafter). Its
value is read as TOML, and as plain text if it is not TOML.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from cluster.config.model import Config, DrafterConfig, TargetConfig
from paceline.errors import ConfigError
from paceline.text import did_you_mean
from workers.models.catalog import spelled_out

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_PREFIX = "PACELINE_"
_SEPARATOR = "__"
_PLAIN_WORDS = {
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "greater than": "above",
    "a valid integer": "a whole number",
    "a valid string": "a text in quotes",
    "a valid boolean": "true or false",
    "String should have at least 1 character": "expected a text that is not empty",
    "a valid tuple": "a list of tables",
    "Value should have at least 1 item after validation, not 0": "expected at least one value",
}

_Place = tuple[str | int, ...]
_Table = TypeVar("_Table", bound=BaseModel)


def _model_of(section: str) -> type[BaseModel]:
    """The model with the keys of a section. For `drafters`: of one table in it."""
    annotation = Config.model_fields[section].annotation
    model = next(iter(get_args(annotation)), annotation)
    assert isinstance(model, type)
    assert issubclass(model, BaseModel)
    return model


_TABLES = {section: _model_of(section) for section in Config.model_fields}


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of a command line that sets a key, or all drafters (`key` is None)."""

    name: str
    section: str
    key: str | None
    value: object


def load_config(
    path: Path | None, environ: Mapping[str, str], *, flags: Iterable[Flag] = ()
) -> Config:
    """Load the file at `path` (None: all defaults), overridden by `environ`, and that by `flags`.

    Raises ConfigError, which names the file, variable or flag and the key of the first mistake.
    """
    config, found = _load(path, environ, flags)
    if config is None or found:
        raise ConfigError(found[0])
    return _spelled_out(config)


def mistakes(path: Path | None, environ: Mapping[str, str]) -> list[str]:
    """All mistakes of a configuration, a line each, as `load_config` says them.

    Whether keys fit together is looked at once each of them has a value that it may have.
    """
    return _load(path, environ)[1]


def _load(
    path: Path | None, environ: Mapping[str, str], flags: Iterable[Flag] = ()
) -> tuple[Config | None, list[str]]:
    found: list[str] = []
    try:
        tables = {} if path is None else _read_toml(path)
    except ConfigError as error:
        return None, [str(error)]
    variables: dict[_Place, str] = {}
    for name in sorted(environ):
        try:
            _override(tables, name, environ[name], variables)
        except ConfigError as error:
            found.append(str(error))
    for flag in flags:
        _put(tables, flag, variables)
    try:
        return Config.model_validate(tables), found
    except ValidationError as error:
        return None, found + _explained(error, path, variables)


def _put(tables: dict[str, Any], flag: Flag, variables: dict[_Place, str]) -> None:
    if flag.key is None:
        tables[flag.section] = flag.value
        variables[flag.section,] = flag.name
        return
    table = tables.setdefault(flag.section, {})
    if isinstance(table, dict):
        table[flag.key] = flag.value
        variables[flag.section, flag.key] = flag.name


def _spelled_out(config: Config) -> Config:
    """Make folders of models and paths of files absolute: workers may run in another folder."""
    target = config.target.model_copy(update={"model": _model(config.target)})
    drafters = tuple(
        one if one.model is None else one.model_copy(update={"model": _model(one)})
        for one in config.drafters
    )
    return config.model_copy(
        update={
            "target": target,
            "drafters": drafters,
            "server": _with_whole_paths(config.server, "api_keys", "tls_cert", "tls_key"),
            "workers": _with_whole_paths(config.workers, "tls"),
        }
    )


def _with_whole_paths(table: _Table, *names: str) -> _Table:
    """The table with absolute paths of files under these keys."""
    paths = {
        name: str(Path(given).expanduser().absolute())
        for name in names
        if (given := getattr(table, name)) is not None
    }
    return table.model_copy(update=paths)


def _model(config: TargetConfig | DrafterConfig) -> str:
    """The model as workers resolve it. A revision becomes part of the name."""
    assert config.model is not None
    if config.revision is None:
        return spelled_out(config.model)
    return f"{config.model}@{config.revision}"


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as stream:
            return tomllib.load(stream)
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: there is no such file; name a TOML file (an empty one is the local demo)"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not TOML: {error}") from None


def _override(
    tables: dict[str, Any], variable: str, value: str, variables: dict[_Place, str]
) -> None:
    """Put a variable's value into `tables`, and note in `variables` which key it set."""
    if not variable.startswith(_PREFIX):
        return
    if _SEPARATOR not in variable:
        _check_separator(variable)
        return
    section, *rest = variable.removeprefix(_PREFIX).lower().split(_SEPARATOR)
    if section not in _TABLES:
        raise ConfigError(
            f"{variable}: there is no section {section!r}; expected one of "
            f"{', '.join(_TABLES)}{did_you_mean(section, _TABLES)}"
        )
    if section == "drafters":
        place = _override_drafter(tables, variable, rest, _toml_value(value))
    else:
        place = (section, _SEPARATOR.join(rest))
        table = tables.setdefault(section, {})
        if isinstance(table, dict):
            table[place[1]] = _toml_value(value)
    variables[place] = variable


def _check_separator(variable: str) -> None:
    """Raise ConfigError if only the separator keeps a variable from setting a key.

    Other variables are left alone, such as those that Kubernetes sets for a service named paceline
    (PACELINE_PORT, ...).
    """
    for section, model in _TABLES.items():
        for key in model.model_fields:
            place = r"DRAFTERS_+(\d+)" if section == "drafters" else section.upper()
            found = re.fullmatch(f"{_PREFIX}{place}_+{key.upper()}", variable)
            if found:
                number = f"{found[1]}{_SEPARATOR}" if section == "drafters" else ""
                meant = f"{_PREFIX}{section}{_SEPARATOR}{number}{key}".upper()
                raise ConfigError(f"{variable}: has no effect; did you mean {meant}?")


def _override_drafter(
    tables: dict[str, Any], variable: str, rest: list[str], value: object
) -> _Place:
    drafters = tables.setdefault("drafters", [{}])
    count = len(drafters) if isinstance(drafters, list) else 0
    if len(rest) != 2 or not rest[0].isdecimal() or int(rest[0]) >= count:
        raise ConfigError(
            f"{variable}: expected PACELINE_DRAFTERS__<NUMBER>__<KEY> with a number below {count}, "
            f"the count of [[drafters]]; add drafters in the file"
        )
    index, key = int(rest[0]), rest[1]
    if isinstance(drafters[index], dict):
        drafters[index][key] = value
    return ("drafters", index, key)


def _toml_value(text: str) -> object:
    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return table["value"] if len(table) == 1 else text


def _explained(
    error: ValidationError, path: Path | None, variables: Mapping[_Place, str]
) -> list[str]:
    """The errors, a line each. A key with a typo comes before the one that is missing for it."""
    complaints = error.errors(include_url=False)
    unknown = {one["loc"][:-1] for one in complaints if one["type"] == "extra_forbidden"}
    complaints.sort(key=lambda one: one["type"] == "missing" and one["loc"][:-1] in unknown)
    source = "the configuration" if path is None else str(path)
    return [_explain(one, source, variables) for one in complaints]


def _explain(complaint: ErrorDetails, source: str, variables: Mapping[_Place, str]) -> str:
    place = complaint["loc"]
    where = variables.get(place) or variables.get(place[:2]) or variables.get(place[:1], source)
    key = _spell(place)
    if complaint["type"] == "extra_forbidden":
        known = _keys_beside(place)
        hint = did_you_mean(str(place[-1]), known)
        return f"{where}: unknown key {key}; expected one of {', '.join(known)}{hint}"
    message = complaint["msg"]
    if complaint["type"] == "missing":
        return f"{where}: {key} is missing; add it"
    if complaint["type"] == "paceline":
        return f"{where}: {key}: {message}" if key else f"{where}: {message}"
    if complaint["type"] == "model_type":
        message = "expected a table"
    message = message.replace("Input should be", "expected")
    for technical, plain in _PLAIN_WORDS.items():
        message = message.replace(technical, plain)
    return f"{where}: {key}: {message[0].lower()}{message[1:]}, got {complaint['input']!r}"


def _spell(place: _Place) -> str:
    spelled = ""
    for part in place:
        spelled += f"[{part}]" if isinstance(part, int) else f".{part}" if spelled else part
    return spelled


def _keys_beside(place: _Place) -> list[str]:
    """The known keys of the table that has the last part of `place`."""
    model = _TABLES[str(place[0])] if len(place) > 1 else Config
    for part in place[1:-1]:
        if isinstance(part, str) and part in model.model_fields:
            model = _table_in(model.model_fields[part].annotation) or model
    return list(model.model_fields)


def _table_in(annotation: Any) -> type[BaseModel] | None:
    """The model within an annotation, such as that of `Mapping[str, Model] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_table_in, get_args(annotation))), None)
