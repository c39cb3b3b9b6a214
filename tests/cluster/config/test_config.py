"""The configuration: every key has a default, and every mistake is one line that names the key."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from cluster.config.fields import GPU_LABEL, INTERFACE
from cluster.config.load import load_config
from cluster.config.model import Config, DrafterConfig
from paceline.errors import ConfigError


def config_of(tmp_path: Path, text: str, **environ: str) -> Config:
    path = tmp_path / "paceline.toml"
    path.write_text(text)
    return load_config(path, environ)


def complaint_of(tmp_path: Path, text: str, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        config_of(tmp_path, text, **environ)
    message = str(caught.value)
    assert "\n" not in message
    return message.removeprefix(f"{tmp_path}/")


def test_an_empty_file_is_the_local_demo(tmp_path: Path) -> None:
    config = config_of(tmp_path, "")
    assert config == load_config(None, {}) == Config()
    assert config.target.model == "demo"
    assert config.drafters == (DrafterConfig(kind="model", model="demo-draft"),)
    assert (config.speculation.policy, config.speculation.window) == ("chain", 8)
    assert (config.server.host, config.server.grpc_port) == ("127.0.0.1", 8001)


def test_every_key_can_be_written(tmp_path: Path) -> None:
    config = config_of(
        tmp_path,
        """
        [target]
        model = "/models/big"
        tensor_parallel = 4
        groups = 1
        dtype = "float32"
        resources = "auto"
        threads = 4
        max_model_len = 2048
        max_num_seqs = 8
        kv_memory = "1.5GiB"
        hung_after = 20
        gpu = "H100"
        labels = { "example.com/rack" = "r_1" }
        memory = "80GiB"
        environment = { NCCL_SOCKET_IFNAME = "eth1", GLOO_SOCKET_IFNAME = "eth0" }
        [[drafters]]
        kind = "model"
        model = "/models/small"
        count = 2
        threads = 1
        gpu = "L40S"
        labels = { zone = "a" }
        memory = 1024
        [[drafters]]
        kind = "ngram"
        [speculation]
        policy = "lockstep"
        verification = "kseq"
        window = 4
        branches = 2
        stopping = "cost"
        drafter = "model"
        wait_ms = 20
        [server]
        host = "0.0.0.0"
        http = false
        http_port = 80
        grpc_port = 0
        max_waiting = 0
        """,
    )
    assert config.target.kv_memory == 3 << 29
    assert config.target.hung_after == 20.0
    assert config.target.memory == 80 << 30
    assert config.target.selector == {"example.com/rack": "r_1", GPU_LABEL: "H100"}
    assert config.target.environment[INTERFACE] == "eth0"
    assert config.drafters[0].count == 2
    assert config.drafters[0].selector == {"zone": "a", GPU_LABEL: "L40S"}
    assert config.drafters[1] == DrafterConfig(kind="ngram", model=None)
    assert config.speculation.wait_ms == 20.0
    assert config_of(tmp_path, "drafters = []").drafters == ()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[target", "paceline.toml: is not TOML:"),
        ("[targt]", "paceline.toml: unknown key targt; expected one of target, drafters"),
        ("[target]\nmodle = 'x'", "unknown key target.modle; "),
        ("[target]\nmodle = 'x'", "; did you mean model?"),
        ("[[drafters]]\n[[drafters]]\ncont = 1", "unknown key drafters[1].cont; "),
        ("target = 3", "paceline.toml: target: expected a table, got 3"),
        ("drafters = 3", "drafters: expected a list of tables, got 3"),
        ("[target]\nmodel = 3", "target.model: expected a text in quotes, got 3"),
        ("[target]\nthreads = 0", 'target.threads: expected "auto" or a whole number'),
        ("[target]\nthreads = true", 'target.threads: expected "auto" or a whole number'),
        ("[target]\nkv_memory = '2 gigs'", "target.kv_memory: expected"),
        ("[target]\nmax_num_seqs = 0", "target.max_num_seqs: expected at least 1, got 0"),
        ("[target]\ntensor_parallel = 0", "target.tensor_parallel: expected at least 1, got 0"),
        (
            "[target]\nemulated = '70b-4xh100'\ntensor_parallel = 2",
            "target: an emulated target is one worker",
        ),
        (
            "[target]\npipeline_parallel = 2",
            "target: pipeline_parallel: a target is not divided by layers; remove the key and set "
            "tensor_parallel",
        ),
        ("[target]\npp = 1", "target: pp: a target is not divided by layers"),
        ("[target]\ngpu = ''", "target.gpu: expected 1 to 63 letters"),
        ("[target]\ngpu = '!H100'", "target.gpu: expected 1 to 63 letters"),
        ("[target]\ngpu = 'H100'\nresources = 'cpu'", "gpu: the target runs on CPUs"),
        ("[target]\nlabels = { zone = 3 }", "target.labels.zone: expected 1 to 63 letters"),
        ("[target]\nlabels = { 'a b' = 'x' }", "target.labels: expected names of labels"),
        (
            "[target]\ngpu = 'H100'\nlabels = { 'ray.io/accelerator-type' = 'L4' }",
            '"gpu" is the label "ray.io/accelerator-type"',
        ),
        ("[pool]\naddress = ['a:1']", "unknown key pool.address; "),
        ("[pool]\naddresses = ['a']", 'pool.addresses[0]: expected "host:port" such as'),
        ("[pool]\naddresses = ['a:0']", 'pool.addresses[0]: expected "host:port" such as'),
        ("[pool]\naddresses = ['::1:9']", 'pool.addresses[0]: expected "host:port" such as'),
        ("[pool]\naddresses = ['http://a:9']", 'pool.addresses[0]: expected "host:port" such as'),
        ("[pool]\nparty = 'a b'", "pool.party: expected"),
        ("[pool]\nname = ''", "pool.name: expected"),
        ("[server]\nname = 'a b'", "server.name: expected"),
        ("[server]\nname = 'a'\n[pool]\nname = 'a'", "pool.name: that is this deployment's own"),
        ("drafters = []\n[target]\ngroups = 0", "target.groups: a deployment without a target"),
        (
            "[target]\ngroups = 0\n[[drafters]]\nkind = 'model'\n[[drafters]]\nkind = 'ngram'",
            "drafters: a pool (target.groups = 0) has no driver",
        ),
        ("[target]\ngroups = 0\n[pool]\nname = 'a'", "pool: a pool (target.groups = 0) uses no"),
        ("[pool]\nlabels = { 'a b' = 'x' }", "pool.labels: expected names of labels"),
        ("[target]\nmemory = 0", "target.memory: expected a number of bytes"),
        ("[target]\nmemory = 'much'", "target.memory: expected a number of bytes"),
        (
            "[target]\nenvironment = { LD_PRELOAD = 'x' }",
            "target.environment: expected names NCCL_... or GLOO_SOCKET_IFNAME, got 'LD_PRELOAD'",
        ),
        ("[target]\nenvironment = { NCCL_DEBUG = 1 }", "target.environment.NCCL_DEBUG: expected"),
        (
            "[target]\nresources = 'cpu'\n[[drafters]]\ngpu = 'L4'",
            'drafters: "gpu" names a kind of GPU, but target.resources = "cpu"',
        ),
        (
            "[[drafters]]\nkind = 'ngram'\ngpu = 'L4'",
            'is always on the driver\'s host; remove the key "gpu"',
        ),
        ("[target]\nresources = 'tpu'", "target.resources: expected one of auto, cpu, gpu"),
        ("[target]\ngroups = -1", "target.groups: expected at least 0, got -1"),
        ("[target]\ndtype = 'int4'", "target.dtype: expected one of auto, float32, bfloat16, "),
        (
            "[speculation]\npolicy = 'replicas'",
            "the policy 'replicas' needs at least 2 target groups, and the layout has 1: raise"
            " target.groups",
        ),
        (
            "[target]\ngroups = 2\n[speculation]\npolicy = 'replicas'\nverification = 'rejection'",
            "needs the rule 'coupled'",
        ),
        (
            "[target]\ngroups = 2\n[speculation]\npolicy = 'replicas'\nbranches = 2",
            "drafts only chains",
        ),
        ("[speculation]\npolicy = 'spread'", "at least 2 drafters, and the layout has 1"),
        ("[speculation]\npolicy = 'pearl'\nbranches = 2", "drafts only chains"),
        (
            "[speculation]\npolicy = 'fanout'\nverification = 'rejection'",
            "speculation.policy: the policy 'fanout' needs the rule 'coupled' or 'one-hot'",
        ),
        ("[speculation]\nmerge = true", "speculation.merge: drafters of at least two kinds"),
        (
            "[[drafters]]\n[[drafters]]\nkind = 'ngram'\n"
            "[speculation]\nmerge = true\npolicy = 'pearl'",
            "speculation.merge: the policy 'pearl' cannot merge drafters, because it drafts only "
            "chains",
        ),
        ("[speculation]\npolicy = 'chian'", "got 'chian'; did you mean chain?"),
        ("[speculation]\nverification = 'ksek'", "got 'ksek'; did you mean kseq?"),
        ("[speculation]\nstopping = 'costs'", "got 'costs'; did you mean cost?"),
        (
            "[speculation]\nbranches = 9",
            "speculation.branches: expected an integer from 1 to 8",
        ),
        ("[speculation]\nbranches = 4\nwindow = 2", "speculation.branches: expected at most the"),
        (
            "[speculation]\nverification = 'rejection'\nbranches = 2",
            "speculation.branches: expected 1 for the rule 'rejection'",
        ),
        ("[speculation]\ndrafter = 'ngram'", "speculation.drafter: no drafter of the kind 'ngram'"),
        (
            "[speculation]\nverification = 'kseq'\n[[drafters]]\nkind = 'ngram'",
            "speculation.verification: the rule 'kseq' needs draft probabilities and is not exact "
            "for deterministic candidates of the drafter 'ngram': choose another rule, or the "
            "drafter 'model'",
        ),
        (
            "[speculation]\nverification = 'one-hot'",
            "speculation.verification: the rule 'one-hot' is not exact for shared noise candidates "
            "of the drafter 'model': choose another rule, or the drafter 'ngram' or 'recycling'",
        ),
        (
            "[target]\nprefix_cache = 'yes'",
            "target.prefix_cache: expected true or false, got 'yes'",
        ),
        ("[server]\nhost = ''", "server.host: expected a text that is not empty, got ''"),
        ("[speculation]\nwindow = '8'", "speculation.window: expected a whole number, got '8'"),
        ("[speculation]\nwindow = 65", "speculation.window: expected 1 to 64 candidates"),
        ("[speculation]\nwait_ms = nan", "speculation.wait_ms: expected"),
        (
            "[[drafters]]\nkind = 'eagle'",
            "drafters[0].kind: expected one of model, ngram, parallel, recycling, suffix, "
            "got 'eagle'",
        ),
        (
            "[[drafters]]\nkind = 'ngrams'",
            "drafters[0].kind: expected one of model, ngram, parallel, recycling, suffix, "
            "got 'ngrams'; did you mean",
        ),
        (
            "[[drafters]]\nkind = 'ngram'\noptions = { least = 2 }",
            "drafters[0]: options: a drafter of kind \"ngram\" has no option 'least'; it has none",
        ),
        (
            "[[drafters]]\nkind = 'parallel'\noptions = { learn = true }",
            "drafters[0]: options: a drafter of kind \"parallel\" has no option 'learn'",
        ),
        ("[[drafters]]\nown_process = false", "cannot draft in the driver"),
        ("[[drafters]]\nkind = 'recycling'\nmodel = 'x'", 'of kind "recycling" has no model'),
        ("[[drafters]]\nkind = 'ngram'\nmodel = 'x'", 'of kind "ngram" has no model'),
        ("[[drafters]]\nkind = 'ngram'\nprefix_cache = true", 'of kind "ngram" has no KV to share'),
        ("[[drafters]]\ncount = 0", "drafters[0].count: expected at least 1, got 0"),
        ("[server]\ngrpc_port = 70000", "server.grpc_port: expected at most 65535, got 70000"),
        (
            "[server]\ncors_origins = ['https://chat.example.com/page']",
            "server.cors_origins: expected origins such as https://chat.example.com, or '*', got",
        ),
        (
            "[server]\notlp_endpoint = 'collector:4317'",
            'server.otlp_endpoint: expected a URL such as http://127.0.0.1:4317, got "collector',
        ),
        ("[server]\ngrpc_port = 8000", "http_port and grpc_port are both 8000"),
        (
            "[target]\nemulated = '8b-h100'\nresources = 'gpu'\n[[drafters]]\nemulated = '1b-h100'",
            "target.resources: a target that replays needs no GPU",
        ),
        ("[plan]\nacceptance = nan", "plan.acceptance: expected a finite number, got nan"),
        ("[plan]\nrtt_ms = inf", "plan.rtt_ms: expected a finite number, got inf"),
        ("[plan]\npolicies = []", "plan.policies: expected at least one value, got []"),
        (
            "[plan]\ntarget = '1b-h10'",
            "there is no latency profile '1b-h10'; expected one of 70b-4xh100, "
            "70b-8xh100-2hosts, 8b-h100",
        ),
        (
            "[target]\nemulated = '8b-h100'\n[[drafters]]\nemulated = '1b-h100'\nacceptance = nan",
            "drafters[0].acceptance: expected a finite number, got nan",
        ),
        (
            "[target]\nemulated = '8b-h100'\n[[drafters]]\nemulated = '1b-h100'\n"
            "[speculation]\ndrafter = 'model'",
            "no drafter of the kind 'model' is deployed (there are: emulated)",
        ),
    ],
)
def test_a_mistake_in_the_file(tmp_path: Path, text: str, complaint: str) -> None:
    message = complaint_of(tmp_path, text)
    assert message.startswith("paceline.toml: ")
    assert complaint in message


@pytest.mark.parametrize(
    "text",
    [
        "drafters = []\n[speculation]\nverification = 'kseq'",
        "[speculation]\nverification = 'one-hot'\npolicy = 'off'",
        "[speculation]\nverification = 'one-hot'\n[[drafters]]\n[[drafters]]\nkind = 'recycling'",
    ],
)
def test_a_rule_that_nothing_speaks_against(tmp_path: Path, text: str) -> None:
    config_of(tmp_path, text)


def test_folders_of_models_are_told_whole_since_workers_have_another_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    text = (
        '[target]\nmodel = "models/mine"\n[[drafters]]\nmodel = "demo"\n[[drafters]]\nmodel = "x"'
    )
    Path("c.toml").write_text(text)
    config = load_config(Path("c.toml"), {})
    assert config.target.model == str(tmp_path / "models" / "mine")
    assert [one.model for one in config.drafters] == ["demo", "x"], "a name wins over a folder"


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent.toml: there is no such file"):
        load_config(tmp_path / "absent.toml", {})
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path, {})


def test_the_environment_overrides_keys(tmp_path: Path) -> None:
    config = config_of(
        tmp_path,
        "[target]\nmodel = 'a'\nthreads = 1\n[[drafters]]\nkind = 'ngram'",
        PACELINE_TARGET__MODEL="b",
        PACELINE_SPECULATION__WINDOW="3",
        PACELINE_DRAFTERS__0__COUNT="2",
        PACELINE_HOME="/no/key",
        OTHER__KEY="x",
    )
    assert (config.target.model, config.target.threads) == ("b", 1)
    assert config.speculation.window == 3
    assert config.drafters == (DrafterConfig(kind="ngram", count=2),)


@pytest.mark.parametrize(
    ("variable", "value", "complaint"),
    [
        ("PACELINE_TARGT__MODEL", "x", "there is no section 'targt'"),
        ("PACELINE_TARGET__MODLE", "x", "unknown key target.modle"),
        ("PACELINE_SPECULATION__WINDOW", "300", "speculation.window: expected 1 to 64 candidates"),
        ("PACELINE_DRAFTERS__4__COUNT", "1", "with a number below 1"),
        ("PACELINE_DRAFTERS__COUNT", "1", "expected PACELINE_DRAFTERS__<NUMBER>__<KEY>"),
    ],
)
def test_a_mistake_in_the_environment_names_the_variable(
    tmp_path: Path, variable: str, value: str, complaint: str
) -> None:
    message = complaint_of(tmp_path, "", **{variable: value})
    assert message.startswith(f"{variable}: ")
    assert complaint in message


def test_it_is_frozen() -> None:
    with pytest.raises(ValidationError):
        Config().target.model = "other"


def test_the_digest_is_of_target_and_drafters_alone(tmp_path: Path) -> None:
    deployment = Config().deployment()
    same = "[speculation]\npolicy = 'off'\nwindow = 2\n[server]\ngrpc_port = 9"
    assert config_of(tmp_path, same).deployment() == deployment
    assert config_of(tmp_path, "[target]\nthreads = 1").deployment() != deployment
    assert config_of(tmp_path, "drafters = []").deployment() != deployment


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("PACELINE_SPECULATION_WINDOW", "PACELINE_SPECULATION__WINDOW"),
        ("PACELINE_SPECULATION_WAIT_MS", "PACELINE_SPECULATION__WAIT_MS"),
        ("PACELINE_PLAN_HOSTS", "PACELINE_PLAN__HOSTS"),
        ("PACELINE_DRAFTERS_0_COUNT", "PACELINE_DRAFTERS__0__COUNT"),
    ],
)
def test_a_variable_with_single_underscores_is_told_the_right_name(
    variable: str, meant: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{variable}: has no effect; did you mean {meant}\\?$"):
        load_config(None, {variable: "4"})
    load_config(None, {meant: "4"})


def test_variables_that_are_no_keys_are_left_alone() -> None:
    """Kubernetes sets such variables for services named paceline and paceline-server."""
    ours = ("PACELINE_HOME", "PACELINE_RAY_HEAD")
    theirs = ("PACELINE_PORT", "PACELINE_SERVICE_HOST", "PACELINE_SERVER_SERVICE_PORT")
    assert load_config(None, dict.fromkeys((*ours, *theirs), "4")) == Config()
