"""`paceline bench decode`: speculation beside plain decoding and transformers, one request a time.

Every row decodes the same prompts greedily to the true end of sequence. Rows of ours are
deployments side by side on one Ray; an idle one takes no processor time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.config import Config, DrafterConfig, TargetConfig
from deploy.bench.calibrate import C, find_fastest
from deploy.bench.contenders import Contender, OwnContender, PeerContender
from deploy.bench.deployments import running_side_by_side
from deploy.bench.interleave import Measured, Prompts, measure_in_turns
from deploy.bench.transformers_process import Assistance, TransformersProcess
from paceline.client import Client
from paceline.generation import GenerateInput
from paceline.options import GenerateOptions
from workers.models import resolve_model

CORES = 2
GAP_ROWS = ("off", "chain")
GAP_TEMPERATURES = (0.0, 1.0)
CALIBRATION_SECONDS = 50.0
"""For all settings together; a last probe of each row may pass its share."""
ASSISTANCES = tuple(
    Assistance(tokens, schedule, threshold)
    for tokens, schedule, threshold in (
        (2, "constant", 0.0),
        (3, "constant", 0.0),
        (4, "constant", 0.0),
        (6, "constant", 0.0),
        (5, "heuristic", 0.0),
        (6, "constant", 0.4),
        (10, "constant", 0.4),
        (20, "constant", 0.4),
        (10, "constant", 0.6),
    )
)
"""The last but one is transformers' own default."""
WINDOWS: Mapping[str, Sequence[int]] = {
    "lockstep": (1, 2, 3, 4, 6),
    "chain": (2, 3, 4, 6, 8),
    "chain-ngram": (2, 4, 8),
}
"""Windows that are tried for each row before the run; the fastest is taken."""
NUM_SETTINGS = len(ASSISTANCES) + sum(len(windows) for windows in WINDOWS.values())


@dataclass(frozen=True, slots=True)
class DecodeSettings:
    """How much is measured."""

    max_tokens: int
    repeats: int
    calibrate: bool
    gap_steps: int


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """The rows, the first among ours being `off`, and gaps by row and temperature in ms."""

    rows: Sequence[Measured]
    gaps_ms: Mapping[tuple[str, float], float]


def deployments(config: Config) -> dict[str, Config]:
    """What is started, by the name that rows refer to. Ports are any free ones.

    `config` says the models; how many threads each device has is what is compared.
    """
    server = config.server.model_copy(update={"http_port": 0, "grpc_port": 0})
    drafter = next(
        (one for one in config.drafters if one.kind == "model"), DrafterConfig(model="demo-draft")
    )
    one_core = config.target.model_copy(update={"threads": 1})
    model_drafter = drafter.model_copy(update={"count": 1, "threads": 1})

    def deployment(target: TargetConfig, *drafters: DrafterConfig) -> Config:
        return config.model_copy(update={"target": target, "drafters": drafters, "server": server})

    return {
        "plain": deployment(config.target.model_copy(update={"threads": CORES})),
        "drafted": deployment(one_core, model_drafter),
        "ngram": deployment(one_core, DrafterConfig(kind="ngram", threads=1)),
    }


def own_contenders(clients: Mapping[str, Client]) -> list[OwnContender]:
    """Our rows, with the windows of the server."""
    return [
        OwnContender("off", clients["plain"], "off", None, f"target {CORES} threads"),
        OwnContender("off-1", clients["drafted"], "off", None, "target 1 thread"),
        OwnContender("lockstep", clients["drafted"], "lockstep", None, "1 thread each"),
        OwnContender("chain", clients["drafted"], "chain", None, "1 thread each"),
        OwnContender("chain-ngram", clients["ngram"], "chain", None, "target 1 thread"),
    ]


def encode_prompts(client: Client, inputs: Sequence[GenerateInput]) -> list[tuple[int, ...]]:
    """The prompts' token ids, which every row is given, so that nobody's time holds tokenising."""
    one_token = GenerateOptions(max_tokens=1, temperature=0.0, policy="off")
    return [client.generate(one, one_token).prompt_token_ids for one in inputs]


class DecodeBench:
    """The suite, once everything is started."""

    def __init__(
        self,
        clients: Mapping[str, Client],
        process: TransformersProcess,
        prompts: Prompts,
        settings: DecodeSettings,
        *,
        tell: Callable[[str], None],
    ) -> None:
        self._own = own_contenders(clients)
        self._process = process
        self._prompts = prompts
        self._settings = settings
        self._tell = tell

    def run(self) -> DecodeResult:
        """Find each row's best setting, measure all rows in turns, then the gaps between steps."""
        assistance = self._best_assistance()
        self._own = [self._with_best_window(one) for one in self._own]
        contenders: list[Contender] = [
            *self._own,
            PeerContender("hf", self._process, None, CORES),
            PeerContender("hf-assisted", self._process, assistance, CORES),
        ]
        total = len(contenders) * len(self._prompts) * self._settings.repeats
        done = 0

        def count(name: str) -> None:
            nonlocal done
            done += 1
            self._tell(f"measuring: {done} of {total} ({name})")

        rows = measure_in_turns(
            contenders,
            self._prompts,
            max_tokens=self._settings.max_tokens,
            repeats=self._settings.repeats,
            on_sample=count,
        )
        return DecodeResult(rows, self._gaps())

    def _best_assistance(self) -> Assistance:
        default = ASSISTANCES[-2]
        if not self._settings.calibrate:
            return default
        peers = [PeerContender(str(one), self._process, one, CORES) for one in ASSISTANCES]
        best = self._calibrate(peers)
        return next(one for one in ASSISTANCES if str(one) == best.name)

    def _with_best_window(self, contender: OwnContender) -> OwnContender:
        if contender.name not in WINDOWS or not self._settings.calibrate:
            return contender
        variants = {
            f"{contender.name} window {window}": replace(contender, window=window)
            for window in WINDOWS[contender.name]
        }
        renamed = [replace(variant, name=name) for name, variant in variants.items()]
        return variants[self._calibrate(renamed).name]

    def _calibrate(self, contenders: Sequence[C]) -> C:
        return find_fastest(
            contenders,
            self._prompts,
            max_tokens=self._settings.max_tokens,
            seconds=CALIBRATION_SECONDS * len(contenders) / NUM_SETTINGS,
            clock=time.monotonic,
            on_probe=lambda name: self._tell(f"calibrating: {name}"),
        )

    def _gaps(self) -> dict[tuple[str, float], float]:
        """The median gap between forward passes over the last steps of each row alone."""
        gaps: dict[tuple[str, float], float] = {}
        for temperature in GAP_TEMPERATURES:
            for contender in self._own:
                if contender.name in GAP_ROWS:
                    self._tell(f"gap between steps: {contender.name}, temperature {temperature:g}")
                    gaps[contender.name, temperature] = self._gap_ms(contender, temperature)
        return gaps

    def _gap_ms(self, contender: OwnContender, temperature: float) -> float:
        client = contender.client
        options = replace(contender.options(256, temperature), ignore_eos=True)
        until = client.stats().steps + self._settings.gap_steps
        number = 0
        # The server's figure is over its last 1,000 steps.
        while client.stats().steps < until:
            client.generate(list(self._prompts[number % len(self._prompts)]), options)
            number += 1
        return client.stats().gap_ms_p50


def run_decode(
    configs: Mapping[str, Config],
    inputs: Sequence[GenerateInput],
    settings: DecodeSettings,
    *,
    home: Path,
    log_folder: Path,
    tell: Callable[[str], None],
) -> DecodeResult:
    """Start everything, measure, end everything. Models that are absent are fetched."""
    with running_side_by_side(configs, home=home, tell=tell) as clients, ExitStack() as stack:
        target = resolve_model(configs["drafted"].target.model, home=home)
        drafter = configs["drafted"].drafters[0].model
        assert drafter is not None
        draft = resolve_model(drafter, home=home)
        process = stack.enter_context(
            TransformersProcess(
                target.folder,
                draft.folder,
                draft_weights=draft.weights,
                threads=CORES,
                log=log_folder / "transformers.log",
            )
        )
        prompts = encode_prompts(clients["plain"], inputs)
        return DecodeBench(clients, process, prompts, settings, tell=tell).run()
