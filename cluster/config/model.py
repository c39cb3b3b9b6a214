"""The keys of a configuration. They are frozen and closed, and each has a default.

The defaults together are the local demo. cluster/config/load.py reads files into these models.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from cluster.config.fields import (
    PIPELINES,
    AutoBytes,
    AutoCount,
    Closed,
    CollectiveSettings,
    Labels,
    LabelValue,
    OptionalBytes,
    Policy,
    Text,
    check_gpu,
    one_of,
    profile_of,
    refusal,
    registered,
    selector_of,
)
from cluster.config.plan_question import PlanConfig
from cluster.driver.fitting import Speculation, check_deployment, rules_by_kind, speculation_of
from paceline.errors import ConfigError, InvalidRequestError
from paceline.options import GenerateOptions, check_option
from paceline.text import did_you_mean
from workers.drafting.kind import DRAFTERS
from workers.emulated.replay_proposer import EMULATED_KIND, EMULATED_RULES
from workers.engine.options import DTYPES, KV_DTYPES, Dtype, KvDtype
from workers.models.catalog import STAND_IN
from workers.models.hub import is_hub_name, repository_of
from workers.process.tracing import check_endpoint
from workers.verification.rule import RULES


def check_revision(model: str | None, revision: str | None) -> None:
    """Raise a refusal unless the model may have this revision."""
    if revision is not None and not (model and is_hub_name(f"{model}@{revision}")):
        raise refusal(
            f'revision: only a model on the hub ("org/name") has one, got {revision!r} for '
            f"{model!r}; remove the key"
        )


def target_or_emulated(given: Any, usual: str) -> Any:
    """An emulated target has the stand-in checkpoint for a model, and needs no GPU."""
    found = model_or_emulated(given, usual)
    if isinstance(found, dict) and found.get("emulated") is not None:
        return {"resources": "cpu"} | found
    return found


def model_or_emulated(given: Any, usual: str) -> Any:
    """Fill in the model: the stand-in for an emulated device, else `usual`.

    Only an emulated device may name the stand-in, and it may name no other model.
    """
    if not isinstance(given, dict):
        return given
    if given.get("emulated") is not None:
        if (model := given.get("model", STAND_IN)) != STAND_IN:
            raise refusal(
                f"an emulated worker has no model, got model = {model!r}; remove the key "
                '"model" or "emulated"'
            )
        return given | {"model": STAND_IN}
    if given.get("model") == STAND_IN:
        raise refusal(f'"{STAND_IN}" is no model; name a latency profile with "emulated"')
    return {"model": usual} | given


def check_emulated(config: Config) -> None:
    """Raise a refusal unless target and drafters are emulated alike, and speculation fits."""
    if config.is_pool:
        return  # Its drafters are for other targets.
    emulated = config.target.emulated is not None
    models = [one for one in config.drafters if one.model is not None]
    if any((one.emulated is not None) != emulated for one in models):
        raise refusal(
            'drafters: expected "emulated" on the target and every model drafter, or on none; '
            "add or remove it"
        )
    if emulated:
        _check_replayed(config, models)


def _check_replayed(config: Config, drafters: Sequence[DrafterConfig]) -> None:
    """Workers that replay share a made-up vocabulary, have no logits, and compute nothing."""
    if config.target.resources == "gpu":
        raise refusal(
            'target.resources: a target that replays needs no GPU, got "gpu"; remove the key'
        )
    for one in drafters:
        if "prefix_cache" in one.model_fields_set:
            raise refusal(
                'drafters: an emulated drafter has no KV to share; remove the key "prefix_cache"'
            )
    chosen = config.speculation
    if chosen.verification != "coupled":
        raise refusal(
            "speculation.verification: emulated workers have no distributions; "
            f'expected "coupled", got "{chosen.verification}"'
        )
    if chosen.stopping != "fixed":
        raise refusal(
            "speculation.stopping: emulated drafters have no logits to stop by; "
            f'expected "fixed", got "{chosen.stopping}"'
        )


def _option(name: str) -> AfterValidator:
    """A default for the request option `name`, in its bounds (paceline/options.py)."""

    def check(value: Any) -> Any:
        try:
            check_option(name, value)
        except InvalidRequestError as error:
            raise refusal(str(error).removeprefix(f"{name}: ")) from None
        return value

    return AfterValidator(check)


Port = Annotated[int, Field(ge=0, le=65535)]


class TargetConfig(Closed):
    """The model whose text is served."""

    model: Text = "demo"
    """A name of `paceline models list`, a checkpoint folder (on every host that has a worker of
    it), or a name on Hugging Face's hub such as `"org/name"` (docs/models.md#models-by-name).
    """
    revision: Text | None = None
    """Of a model on the hub: a branch, a tag or a commit. None: its main branch."""
    emulated: Annotated[Text | None, profile_of("target")] = None
    """A latency profile in place of the model (docs/emulation.md): nothing is computed, and the
    text is made up.
    """
    tensor_parallel: Annotated[int, Field(ge=1)] = 1
    """Shards that the model is cut into, each a process with a part of every layer."""
    groups: Annotated[int, Field(ge=0, le=64)] = 1
    """Target groups: copies of the whole model, each on devices of its own. Requests share them;
    under the policy `replicas`, several verify one request. 0: no target, but a pool of drafters
    for other deployments (docs/drafter-pool.md).
    """
    dtype: Annotated[Dtype, one_of(*DTYPES)] = "auto"
    """Of weights and activations: `"auto"`, `"float32"`, `"bfloat16"`, `"float16"`, or `"int8"`
    (CPUs only). auto: float32 on a CPU, the checkpoint's on a GPU.
    """
    resources: Annotated[Literal["auto", "cpu", "gpu"], one_of("auto", "cpu", "gpu")] = "auto"
    """The device of each shard and each model drafter: `"cpu"`, `"gpu"`, or auto: a GPU each if
    there are enough, else CPU.
    """
    threads: AutoCount = "auto"
    """CPU threads of each shard, on cores of its own if the host has enough. auto: target and
    drafters divide them, and where our own kernels run, a step also uses those of a worker that
    waits.
    """
    max_model_len: AutoCount = "auto"
    """Upper bound on the tokens of prompt and output. auto: the checkpoint's."""
    max_num_seqs: Annotated[int, Field(ge=1)] = 64
    """Upper bound on the sequences that a target group decodes at once."""
    kv_cache_dtype: Annotated[KvDtype, one_of(*KV_DTYPES)] = "auto"
    """The dtype of the target's stored keys and values. auto: that of activations. `"fp8"`: float8,
    on GPUs, half the bytes; the text is that of the model with rounded keys and values
    (docs/models.md#float8-kv).
    """
    kv_memory: AutoBytes = "auto"
    """Memory for KV of each shard and each model drafter: bytes, or a text such as `"2GiB"`. auto:
    1 GiB on a CPU, what a profile run leaves on a GPU.
    """
    batch_invariant: bool = True
    """On a GPU: a row has the same bits in any batch and window, at a few per cent of a step's
    time. On a CPU it always has.
    """
    kernels: Literal["auto"] | bool = "auto"
    """On GPUs: our own kernels run, in the target and in model drafters, in place of torch's. auto:
    where a check at start-up passes. true: a worker refuses to start if it fails. false: never
    (docs/gpu.md).
    """
    prefix_cache: bool = True
    """Requests of one `tenant` (a field of a request) share the KV of equal prefixes."""
    hung_after: Annotated[float, Field(ge=1, le=3600, allow_inf_nan=False)] = 60.0
    """Seconds without an answer to driver and controller after which a worker is ended and started
    again, 1 to 3,600. A step may take longer, depending on its tokens, and a collective of shards
    half as long.
    """
    gpu: LabelValue | None = None
    """The kind of each shard's GPU, as Ray names it, such as `"H100"`. None: any
    (docs/models.md#several-hosts).
    """
    labels: Labels = Field(default_factory=dict)
    """Labels that the Ray node of a shard must have: `{ zone = "a" }`."""
    memory: OptionalBytes = None
    """Host memory that Ray sets aside for each shard, such as `"80GiB"`. None: Ray does not count
    it.
    """
    environment: CollectiveSettings = Field(default_factory=dict)
    """Settings of the collectives between shards: variables `NCCL_...`, and `GLOO_SOCKET_IFNAME`.
    """

    @model_validator(mode="before")
    @classmethod
    def _emulated_or_not(cls, given: Any) -> Any:
        for key in PIPELINES:
            if isinstance(given, dict) and key in given:
                raise refusal(
                    f"{key}: a target is not divided by layers; remove the key and set "
                    "tensor_parallel, whose shards may be on several hosts"
                )
        return target_or_emulated(given, "demo")

    @model_validator(mode="after")
    def _device_fits(self) -> TargetConfig:
        check_gpu(self.gpu, self.labels)
        if self.gpu is not None and self.resources == "cpu":
            raise refusal('gpu: the target runs on CPUs (resources = "cpu"); remove one of the two')
        if self.kv_cache_dtype != "auto" and self.resources == "cpu":
            raise refusal(
                f'kv_cache_dtype: "{self.kv_cache_dtype}" is for GPUs, but the target runs on CPUs '
                '(resources = "cpu"); remove one of the two'
            )
        return self

    @property
    def selector(self) -> Mapping[str, str]:
        return selector_of(self.gpu, self.labels)

    @model_validator(mode="after")
    def _revision_is_of_hub(self) -> TargetConfig:
        check_revision(self.model, self.revision)
        return self

    @model_validator(mode="after")
    def _emulated_is_one(self) -> TargetConfig:
        if self.emulated is not None and self.tensor_parallel > 1:
            raise refusal(
                f"an emulated target is one worker, whose profile counts the GPUs; tensor_parallel "
                f"is {self.tensor_parallel}, expected 1"
            )
        return self


class DrafterConfig(Closed):
    """`count` drafters of one kind.

    `model`, `emulated` and `prefix_cache` apply to kinds with a model only. A kind without a model
    drafts in the driver, or in a process of its own (`own_process`).
    """

    kind: Annotated[str, registered(DRAFTERS)] = "model"
    """`"model"`, `"parallel"`, `"ngram"`, `"recycling"`, `"suffix"`, or one that a package adds
    (docs/extending.md#a-drafter-kind).
    """
    model: Text | None = None
    """As `target.model`, for kinds that have a model. None: the kind's own default."""
    revision: Text | None = None
    """As `target.revision`."""
    emulated: Annotated[Text | None, profile_of("drafter")] = None
    """A latency profile in place of the model, if the target is emulated too."""
    acceptance: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.8
    """Of an emulated drafter: the chance that a guess is right."""
    hit_rate: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.5
    """Of an emulated drafter: the chance that its second guess is right where the first is wrong.
    """
    count: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of such drafters, 1 to 64."""
    threads: AutoCount = "auto"
    """CPU threads of each that has a model."""
    prefix_cache: bool = True
    """For kinds with a model: as `target.prefix_cache`, in the drafter's own KV."""
    own_process: bool | None = None
    """Whether it has a process of its own. None: one with a model has, others draft in the driver's
    process (docs/policies.md#drafters-in-the-driver).
    """
    gpu: LabelValue | None = None
    """As `target.gpu`, for each drafter with a model."""
    labels: Labels = Field(default_factory=dict)
    """As `target.labels`, for each drafter with a model."""
    memory: OptionalBytes = None
    """As `target.memory`, for each drafter with a model."""
    options: Mapping[str, Any] = Field(default_factory=dict)
    """Options of the kind itself. Of `model`: `max_model_len`, `kv_memory_mib`, `kv_cache_dtype`,
    `weights`, `tokenizer` for another vocabulary (docs/drafters.md#another-vocabulary), and
    `learn = true` (docs/drafters.md#learning-while-it-serves).
    """

    @model_validator(mode="before")
    @classmethod
    def _model_of_kind(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        name = given.get("kind", "model")
        kind = DRAFTERS.all().get(name) if isinstance(name, str) else None
        if kind is None or kind.default_model is None:
            return given
        return model_or_emulated(given, kind.default_model)

    @property
    def selector(self) -> Mapping[str, str]:
        """Labels that its node must have, the kind of GPU among them."""
        return selector_of(self.gpu, self.labels)

    @model_validator(mode="after")
    def _keys_fit_kind(self) -> DrafterConfig:
        check_gpu(self.gpu, self.labels)
        if DRAFTERS.all()[self.kind].default_model is None:
            for key in ("gpu", "labels", "memory"):
                if getattr(self, key):
                    raise refusal(
                        f'a drafter of kind "{self.kind}" has no model and is always '
                        f'on the driver\'s host; remove the key "{key}"'
                    )
            for key in ("model", "emulated"):
                if getattr(self, key) is not None:
                    raise refusal(
                        f'a drafter of kind "{self.kind}" has no model; remove the key "{key}"'
                    )
            if "prefix_cache" in self.model_fields_set:
                raise refusal(
                    f'a drafter of kind "{self.kind}" has no KV to share; remove the key '
                    '"prefix_cache"'
                )
        elif self.own_process is False:
            raise refusal(
                f'a drafter of kind "{self.kind}" has a model and cannot draft in the '
                'driver; remove the key "own_process"'
            )
        self.options_of_kind()
        check_revision(self.model, self.revision)
        if self.emulated is None and {"acceptance", "hit_rate"} & self.model_fields_set:
            raise refusal('"acceptance" and "hit_rate" need an emulated drafter; remove them')
        return self

    @property
    def is_in_driver(self) -> bool:
        return not (self.own_process or DRAFTERS.all()[self.kind].default_model)

    def options_of_kind(self) -> Any:
        """The table `options` as the kind reads it, an instance of DrafterKind.options."""
        options = DRAFTERS.all()[self.kind].options
        names = [one.name for one in dataclasses.fields(options)]
        for key in self.options:
            if key not in names:
                known = f"expected one of {', '.join(names)}" if names else "it has none"
                raise refusal(
                    f'options: a drafter of kind "{self.kind}" has no option {key!r}; {known}'
                    f"{did_you_mean(key, names)}"
                )
        try:
            return TypeAdapter(options).validate_python(dict(self.options))
        except ValidationError as error:
            wrong = error.errors()[0]
            place = ".".join(map(str, ("options", *wrong["loc"])))
            message = wrong["msg"].replace("Input should be", "expected")
            raise refusal(f"{place}: {message}, got {wrong['input']!r}") from None


class SpeculationConfig(Closed):
    """Defaults for requests. None of them belongs to the deployment."""

    policy: Policy = "chain"
    """`"off"`, `"lockstep"`, `"pearl"`, `"chain"`, `"fanout"`, `"spread"`, `"replicas"` or `"auto"`
    (docs/policies.md).
    """
    verification: Annotated[str, registered(RULES)] = "coupled"
    """The rule: `"coupled"`, `"rejection"`, `"kseq"`, `"recursive"`, `"mcsd"` or `"one-hot"`
    (docs/rules.md).
    """
    window: Annotated[int, _option("window")] = 8
    """Upper bound on the candidates of a sequence that a step verifies, 1 to 64."""
    branches: Annotated[int, _option("branches")] = 1
    """Candidates at each position, 1 to 8. 1: chains."""
    stopping: Annotated[str, _option("stopping")] = "fixed"
    """When a drafter stops before the window is full: `"adaedl"`, `"confidence"`, `"cost"` or
    `"fixed"` (docs/rules.md#when-to-stop).
    """
    drafter: Annotated[str, registered(DRAFTERS, "any")] = "any"
    """The kind of drafter to use if several are deployed and fit."""
    merge: bool = False
    """One drafter of each kind that fits drafts for a request; one tree holds all candidates."""
    wait_ms: Annotated[float, Field(gt=0, le=60_000, allow_inf_nan=False)] = 1000.0
    """Upper bound on the wait of a step under a policy that waits (`lockstep`, `pearl`), in
    milliseconds.
    """

    def defaults(self) -> Speculation:
        """How a request without options of its own speculates.

        Raises InvalidRequestError, which names the option, if the keys do not fit together.
        """
        options = GenerateOptions(
            policy=self.policy,
            rule=self.verification,
            window=self.window,
            branches=self.branches,
            stopping=self.stopping,
            drafter=None if self.drafter == "any" else self.drafter,
            merge=self.merge,
        )
        return speculation_of(options, Speculation())


def _where(value: object) -> object:
    """An address "host:port" of a server."""
    host, _, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    is_port = port.isascii() and port.isdigit() and 0 < int(port) < 65536
    if not host or not is_port or "/" in host or (":" in host and host[0] + host[-1] != "[]"):
        raise refusal(f'expected "host:port" such as "drafters.example:9002", got {value!r}')
    return value


def _name(value: object) -> object:
    """A name of a party or a deployment, which can be sent as metadata of a call."""
    if value is not None and not (isinstance(value, str) and re.fullmatch(r"[!-~]{1,128}", value)):
        raise refusal(f"expected 1 to 128 ASCII letters, digits and signs, got {value!r}")
    return value


class PoolConfig(Closed):
    """Drafters that others have started and use as well (docs/drafter-pool.md)."""

    addresses: Annotated[
        tuple[Annotated[str, BeforeValidator(_where)], ...], Field(strict=False, max_length=64)
    ] = ()
    """Drafters that others have started, "host:port" each. A name with several addresses means as
    many drafters.
    """
    name: Annotated[str, BeforeValidator(_name)] | None = None
    """The deployment on the same Ray cluster whose drafters are used (`server.name` there)."""
    party: Annotated[str, BeforeValidator(_name)] | None = None
    """All drivers that give the same name have one share of a drafter. None: each has its own."""
    near: Annotated[tuple[Text, ...], Field(strict=False, max_length=8)] = ()
    """Labels that count as near if driver and drafter have the same value, the finest first:
    `["rack", "zone"]`.
    """
    labels: Labels = Field(default_factory=dict)
    """Labels of the driver, besides those of its Ray node."""


def check_origins(given: Iterable[str]) -> tuple[str, ...]:
    """Origins of web pages, as browsers write them. Raises ConfigError for what is none."""
    origins = tuple(given)
    for origin in origins:
        if origin != "*" and not re.fullmatch(r"https?://[^/?#@\s]+", origin):
            raise ConfigError(
                "cors_origins: expected origins such as https://chat.example.com, or '*', got "
                f"{origin!r:.100}"
            )
    return origins


class ServerConfig(Closed):
    """Where the deployment is reached, and how many requests may wait. Port 0: any free port."""

    name: Annotated[str, BeforeValidator(_name)] | None = None
    """The deployment's name on its Ray cluster. None: "paceline" for `paceline up`, none for jobs.
    """
    host: Text = "127.0.0.1"
    """The address to listen on."""
    http: bool = True
    """Whether a gateway serves OpenAI's HTTP interface at `http_port`."""
    http_port: Port = 8000
    """0: any free port."""
    grpc_port: Port = 8001
    """0: any free port."""
    max_waiting: Annotated[int, Field(ge=0)] = 256
    """Upper bound on the requests that wait for a place, for the tokenizer, or for a caller that
    does not read. The next is refused.
    """
    log_format: Annotated[Literal["text", "json"], one_of("text", "json")] = "text"
    """The form of the lines of all logs: `"text"` or `"json"`, which also has a line for each HTTP
    request (docs/observability.md#logs).
    """
    otlp_endpoint: Text | None = None
    """URL of an OpenTelemetry receiver, to which driver and gateway send traces
    (docs/observability.md#traces).
    """
    api_keys: Text | None = None
    """A file with the hashes of API keys (docs/security.md). None: whoever reaches the server can
    use it.
    """
    served_model_name: Text | None = None
    """The model's name to callers. None: the folder's, or the name on the hub."""
    cors_origins: Annotated[tuple[Text, ...], Field(strict=False, max_length=64)] = ()
    """Web pages of these origins may call the gateway: `["https://chat.example.com"]`, or `["*"]`
    (docs/http.md#web-pages).
    """
    tls_cert: Text | None = None
    """PEM file of a certificate chain, together with `tls_key`. None: plain text."""
    tls_key: Text | None = None
    """PEM file of its private key."""

    @field_validator("otlp_endpoint")
    @classmethod
    def _endpoint_is_a_url(cls, given: str | None) -> str | None:
        try:
            return None if given is None else check_endpoint(given)
        except ConfigError as error:
            raise refusal(str(error).removeprefix("otlp_endpoint: ")) from None

    @field_validator("cors_origins")
    @classmethod
    def _origins_are_origins(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        try:
            return check_origins(given)
        except ConfigError as error:
            raise refusal(str(error).removeprefix("cors_origins: ")) from None

    @model_validator(mode="after")
    def _certificate_has_key(self) -> ServerConfig:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise refusal("tls_cert and tls_key: give both, or neither")
        return self

    @model_validator(mode="after")
    def _ports_differ(self) -> ServerConfig:
        if self.http and self.http_port == self.grpc_port != 0:
            raise refusal(f"http_port and grpc_port are both {self.grpc_port}; give each its own")
        return self


class WorkersConfig(Closed):
    """Connections among the processes of a deployment: workers, driver and gateway."""

    tls: Text | None = None
    """A folder on each host with tls.crt, tls.key and ca.crt: mutual TLS among workers, driver and
    gateway (docs/security.md#among-workers). None: plain text.
    """


class Config(Closed):
    """A deployment. `drafters = []` is plain decoding."""

    target: TargetConfig = TargetConfig()
    drafters: Annotated[tuple[DrafterConfig, ...], Field(strict=False)] = (
        DrafterConfig(model="demo-draft"),
    )
    pool: PoolConfig = PoolConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    server: ServerConfig = ServerConfig()
    workers: WorkersConfig = WorkersConfig()
    plan: PlanConfig = PlanConfig()

    @property
    def rules_by_kind(self) -> Mapping[str, frozenset[str]]:
        """The kinds of the drafters, as they describe themselves, and the rules that they fit."""
        found = rules_by_kind(one.kind for one in self.drafters if one.emulated is None)
        if any(one.emulated is not None for one in self.drafters):
            found[EMULATED_KIND] = EMULATED_RULES
        return found

    @model_validator(mode="after")
    def _emulated_together(self) -> Config:
        check_emulated(self)
        return self

    @model_validator(mode="after")
    def _drafters_have_devices(self) -> Config:
        if self.target.resources == "cpu" and any(one.gpu is not None for one in self.drafters):
            raise refusal(
                'drafters: "gpu" names a kind of GPU, but target.resources = "cpu" keeps all '
                "workers on CPUs; remove one of the two"
            )
        return self

    @property
    def is_pool(self) -> bool:
        """Whether it has drafters only, for other deployments."""
        return self.target.groups == 0

    @model_validator(mode="after")
    def _pool_has_drafters(self) -> Config:
        if not self.is_pool:
            return self
        if not any(one.model is not None for one in self.drafters):
            raise refusal(
                "target.groups: a deployment without a target is a pool of drafters, and needs one "
                "with a model; add [[drafters]], or set groups to 1 or more"
            )
        if any(one.is_in_driver for one in self.drafters):
            raise refusal(
                "drafters: a pool (target.groups = 0) has no driver to draft in; set own_process = "
                "true, or remove the drafter"
            )
        if self.pool.name is not None or self.pool.addresses:
            raise refusal(
                "pool: a pool (target.groups = 0) uses no other pool; remove name and addresses"
            )
        return self

    @model_validator(mode="after")
    def _pool_is_another(self) -> Config:
        if self.pool.name is not None and self.pool.name == self.server.name:
            raise refusal("pool.name: that is this deployment's own name (server.name)")
        return self

    @model_validator(mode="after")
    def _drafters_fit(self) -> Config:
        if self.is_pool:
            return self
        try:
            self.check_speculation(self.speculation.defaults())
        except InvalidRequestError as error:
            key = "verification" if error.field == "rule" else error.field
            raise refusal(
                f"speculation.{key}: {str(error).removeprefix(f'{error.field}: ')}"
            ) from None
        return self

    @property
    def served_model_name(self) -> str | None:
        """The model's name to callers; None: the driver takes that of the checkpoint."""
        if self.server.served_model_name is not None or not is_hub_name(self.target.model):
            return self.server.served_model_name
        return repository_of(self.target.model)

    def check_speculation(self, speculation: Speculation) -> None:
        """Raise InvalidRequestError if what is deployed cannot speculate like this."""
        # How many a pool has, and which, is seen when it runs.
        is_known = not self.pool.addresses and self.pool.name is None
        check_deployment(
            speculation,
            self.rules_by_kind if is_known else None,
            num_drafters=sum(drafter.count for drafter in self.drafters) if is_known else None,
            num_groups=self.target.groups,
        )

    def deployment(self) -> dict[str, Any]:
        """What the workers are: the tables of target and drafters, as JSON.

        Policy, rule and window are fields of a request, and ports only say where to listen. So two
        configurations that differ in those have the same deployment.
        """
        return self.model_dump(mode="json", include={"target", "drafters"})
