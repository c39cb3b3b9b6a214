"""Flags that several commands share, and checks of flags before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from cluster.config.model import Config
from cluster.driver.fitting import check_deployment, speculation_of
from paceline.access import Access, Credentials
from paceline.address import parse_address
from paceline.errors import InvalidRequestError
from paceline.options import GenerateOptions, check_options
from workers.drafting.kind import DRAFTERS
from workers.verification.rule import RULES

if TYPE_CHECKING:
    from cluster.config.load import Flag

T = TypeVar("T")

_FLAG_OF_OPTION = {"rule": "verification"}


def check_server(address: str | None) -> str | None:
    """Refuse an address that is neither HOST:PORT nor [IPV6]:PORT, before anything starts."""
    if address is not None:
        parse_address(address, "server")
    return address


def drain_option(says: str) -> Any:
    """The option --drain: seconds that requests have to end. `says`: its help."""
    return typer.Option(min=0, max=3600, metavar="SECONDS", help=says)


ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="TOML file; without it, the local demo.")
]
MaxTokensOption = Annotated[int, typer.Option(help="Maximum tokens of a row.")]
TemperatureOption = Annotated[
    float | None, typer.Option(help="0 is greedy. Default: the checkpoint's.")
]
SeedOption = Annotated[int, typer.Option(help="Row i uses seed + i.")]
VerificationOption = Annotated[
    str | None, typer.Option(help=f"A verification rule: {', '.join(RULES)}.")
]
LimitOption = Annotated[int | None, typer.Option(help="Use only the first N rows.")]
QuietOption = Annotated[
    bool, typer.Option("--quiet", help="No progress on stderr. Failed rows are still named.")
]
ServerOption = Annotated[
    str | None,
    typer.Option(
        callback=check_server,
        help="HOST:PORT of an inference server. Default: the running cluster with the same "
        "configuration, else a private one that ends with the command.",
    ),
]
RunningOption = Annotated[
    str | None,
    typer.Option(
        "--server",
        callback=check_server,
        help="HOST:PORT of an inference server. Default: the one of `paceline up`.",
    ),
]
JsonOption = Annotated[
    Path | None, typer.Option("--json", help="Also write the figures to this file.")
]
BranchesOption = Annotated[
    int | None, typer.Option(help="Candidates at each position, 1 to 8. 1 drafts chains.")
]


@dataclass(frozen=True, slots=True)
class SamplingFlags:
    """Fields of GenerateOptions that belong together in a command line."""

    top_k: Annotated[
        int | None, typer.Option(help="0 keeps all tokens. Default: the checkpoint's.")
    ] = None
    top_p: Annotated[
        float | None, typer.Option(help="Above 0, at most 1. Default: the checkpoint's.")
    ] = None
    seed: SeedOption = 0


@dataclass(frozen=True, slots=True)
class DraftingFlags:
    """Likewise."""

    branches: BranchesOption = None
    stopping: Annotated[
        str | None,
        typer.Option(help="When a drafter stops early: fixed (never), adaedl, confidence or cost."),
    ] = None
    drafter: Annotated[
        str | None, typer.Option(help=f"Kind of drafter: {', '.join(DRAFTERS)}.")
    ] = None
    merge: Annotated[
        bool | None,
        typer.Option("--merge/--no-merge", help="Have a drafter of each kind draft, in one tree."),
    ] = None


@dataclass(frozen=True, slots=True)
class AccessFlags:
    """How clients reach a server that asks for a key, or has TLS."""

    key: Annotated[
        str | None,
        typer.Option(
            envvar="PACELINE_API_KEY",
            help="An API key of the server. Others see it in the list of processes: set the "
            "variable.",
        ),
    ] = None
    ca: Annotated[
        str | None,
        typer.Option(
            envvar="PACELINE_CA",
            metavar="FILE",
            help="PEM file with the authority of the server's certificate. Turns TLS on.",
        ),
    ] = None

    def check(self) -> Access:
        """What clients get. Raises InvalidRequestError, which names the flag."""
        access: Access = {"key": self.key or None, "ca": self.ca or None}
        Credentials.of(**access)
        return access


def check_request(options: GenerateOptions, config: Config, *, server: str | None) -> None:
    """Raise InvalidRequestError, which names the flag, for options that would be refused.

    The defaults are those of `config`. A named `server` has drafters of its own; without one, those
    of `config` must be able to draft what is asked for.
    """
    try:
        check_options(options)
        deployed = config.rules_by_kind if server is None else ()
        speculation = speculation_of(options, config.speculation.defaults(), deployed)
        if server is None:
            config.check_speculation(speculation)
        else:
            check_deployment(speculation)
    except InvalidRequestError as error:
        field, message = error.args
        flag = _FLAG_OF_OPTION.get(field, field).replace("_", "-")
        raise InvalidRequestError(flag, message) from None


@dataclass(frozen=True, slots=True)
class DeploymentFlags:
    """What `up` and `serve` are told. `given`: a model, or a TOML file, whose keys the flags
    override. None: the flag was left out."""

    given: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL|CONFIG",
            help="A checkpoint's folder, a name on Hugging Face's hub (org/name), or a TOML file. "
            "Without it, the local demo.",
        ),
    ] = None
    draft: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL|KIND",
            help="The drafter: a model with the target's tokenizer, or a kind without a model. "
            "Default with a MODEL: ngram.",
        ),
    ] = None
    tensor_parallel: Annotated[
        int | None, typer.Option("--tensor-parallel-size", "-tp", help="Devices of the target.")
    ] = None
    policy: Annotated[str | None, typer.Option(help="Default with a MODEL: auto.")] = None
    host: Annotated[str | None, typer.Option(help="Where to listen.")] = None
    port: Annotated[int | None, typer.Option(help="Of HTTP. 0: any free one. Default: 8000.")] = (
        None
    )
    grpc_port: Annotated[int | None, typer.Option(help="0: any free one. Default: 8001.")] = None
    served_model_name: Annotated[str | None, typer.Option(help="Name of the model to callers.")] = (
        None
    )
    max_model_len: Annotated[
        int | None, typer.Option(help="Most tokens of a request and its answer.")
    ] = None

    def load(self, environ: Mapping[str, str]) -> Config:
        """The configuration. Raises ConfigError, which names the flag or the key."""
        from cluster.config.load import load_config

        given = self.given or ""
        is_file = given.endswith(".toml") or Path(given).is_file()
        path = Path(given) if is_file else None
        return load_config(path, environ, flags=self._flags("" if is_file else given))

    def _flags(self, model: str) -> Iterator[Flag]:
        from cluster.config.load import Flag

        draft, policy = self.draft, self.policy
        if model:
            yield Flag("MODEL", "target", "model", model)
            draft, policy = draft or ("ngram" if model != "demo" else None), policy or "auto"
        if draft is not None:
            kind = DRAFTERS.all().get(draft)
            has_no_model = kind is not None and kind.default_model is None
            drafter = {"kind": draft} if has_no_model else {"model": draft}
            yield Flag("--draft", "drafters", None, [drafter])
        for name, section, key, value in (
            ("--tensor-parallel-size", "target", "tensor_parallel", self.tensor_parallel),
            ("--max-model-len", "target", "max_model_len", self.max_model_len),
            ("--policy", "speculation", "policy", policy),
            ("--host", "server", "host", self.host),
            ("--port", "server", "http_port", self.port),
            ("--grpc-port", "server", "grpc_port", self.grpc_port),
            ("--served-model-name", "server", "served_model_name", self.served_model_name),
        ):
            if value is not None:
                yield Flag(name, section, key, value)


def check_at_least_one(name: str, value: int | None) -> None:
    """Raise InvalidRequestError unless the count is missing or positive."""
    if value is not None and value < 1:
        raise InvalidRequestError(name, f"expected an integer of at least 1, got {value}")


def parse_list(name: str, text: str, parse: Callable[[str], T], expected: str) -> list[T]:
    """The values of a comma-separated flag, without repeats. Raises InvalidRequestError."""
    values: list[T] = []
    for part in text.split(","):
        try:
            value = parse(part.strip())
        except ValueError as error:
            raise InvalidRequestError(name, f"expected {expected}, got {text!r}") from error
        if value not in values:
            values.append(value)
    return values
