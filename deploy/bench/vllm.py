"""`paceline bench vllm`: drafters inside the real vLLM, beside vLLM without and with its own ways.

EMULATED: vLLM is real, and so are our drafters' processes and gRPC. The target's passes take the
time of a profile (paceline_vllm/emulated.py), and the drafters guess right at a set rate. Part
`demo` is real: vLLM on this host's CPU with the demo pair. `make vllm` makes vLLM's environment.
"""

from __future__ import annotations

import json
import os
import random
import re
import statistics
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from deploy.bench.harness import Asked, Document, Row, Suite, register, table
from deploy.bench.lookahead_cells import emulated_pair
from deploy.bench.processes import LineProcess, WorkerProcess
from deploy.session.ray_head import free_ports
from deploy.terminal.lines import whole_table
from paceline.errors import UnavailableError
from workers.emulated.replay_text import Guess
from workers.models.catalog import resolve_model
from workers.models.stand_in import NUM_RESERVED, VOCAB_SIZE, stand_in_in

ROOT = Path(__file__).resolve().parents[2]
VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
TARGET, DRAFTER = "70b-4xh100", "1b-h100"
ACCEPTANCE, HIT_RATE, WINDOW, DRAFT_MS = 0.85, 0.85, 8, 2.5
GUESS = Guess(ACCEPTANCE, HIT_RATE, 1)
RTTS_MS, BATCHES, POLICIES = (0.1, 2.0, 10.0), (1, 8, 32), ("lockstep", "chain", "fanout")
PROMPT = 32
PARTS = ("emulated", "demo")
_NGRAM = {"method": "ngram", "num_speculative_tokens": WINDOW, "prompt_lookup_max": 4}
_HOOK = {"method": "custom_class", "num_speculative_tokens": WINDOW}
COLUMNS = (
    ("part", "shown", ""),
    ("row", "name", ""),
    ("at once", "batch", "d"),
    ("rtt ms", "rtt_ms", "g"),
    ("tokens/s", "tokens_per_second", ".1f"),
    ("x plain", "speedup", ".2f"),
    ("hook ms", "hook_ms", ".2f"),
    ("same text", "same_text", ""),
)


class _Engine(LineProcess):
    def __init__(
        self,
        name: str,
        keywords: Mapping[str, object],
        environ: Mapping[str, str],
        log: Path,
        *,
        drafters: str | None = None,
        policy: str = "chain",
    ) -> None:
        """`drafters`: addresses of ours, which draft by `policy`; None: vLLM without us."""
        self.name = name
        own = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
        }
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        own |= {"PYTHONPATH": path, **environ}
        self._metrics_port: int | None = None
        if drafters is not None:
            (self._metrics_port,) = free_ports(1)
            own |= {"PACELINE_DRAFTERS": drafters, "PACELINE_SPECULATION__POLICY": policy}
            own["PACELINE_METRICS_PORT"] = str(self._metrics_port)
            hook = {**_HOOK, "model": "paceline_vllm.RemoteDrafters"}
            keywords = {**keywords, "speculative_config": hook}
        super().__init__(
            "paceline_vllm.engine_lines",
            [json.dumps(keywords)],
            log=log / f"vllm-{name}.log",
            python=VLLM_PYTHON,
            environ=own,
        )

    def decode(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> tuple[Any, float]:
        """The token ids of each prompt, and the seconds that they took together."""
        answer = self.ask({"prompts": prompts, "max_tokens": max_tokens})
        return answer["token_ids"], float(answer["seconds"])

    def hook(self) -> tuple[float, float]:
        """How often vLLM has called our hook, and for how many seconds; 0 and 0 without one."""
        if self._metrics_port is None:
            return 0.0, 0.0
        with urllib.request.urlopen(f"http://127.0.0.1:{self._metrics_port}/metrics") as answer:
            told = dict(re.findall(r"^(paceline:\S+) (\S+)$", answer.read().decode(), re.MULTILINE))
        calls, seconds = (told[f"paceline:vllm_hook_{one}_total"] for one in ("calls", "seconds"))
        return float(calls), float(seconds)


def _keywords(folder: Path, batch: int, **more: object) -> dict[str, object]:
    return {
        "model": str(folder),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 1024,
        "max_num_seqs": max(8, batch),
        "enable_prefix_caching": False,
        **more,
    }


def _measure(
    asked: Asked,
    engines: Sequence[_Engine],
    prompts: Sequence[Sequence[int]],
    batches: Sequence[int],
    *,
    max_tokens: int,
    labels: Mapping[str, object],
) -> list[Row]:
    """Rows of each engine and batch, in rounds in turns. The first engine is vLLM plain."""
    rows: list[Row] = []
    for engine in engines:  # The first answer comes once the engine is loaded.
        asked.tell(f"vLLM, {engine.name}: loading")
        engine.decode(prompts[:1], 8)
    for batch in batches:
        seconds: dict[str, list[float]] = {one.name: [] for one in engines}
        texts: dict[str, Any] = {}
        hooks = {one.name: one.hook() for one in engines}
        for number in range(asked.repeats):
            first = number % len(engines)
            for engine in [*engines[first:], *engines[:first]]:
                asked.tell(f"{batch} at once, {engine.name}, round {number + 1} of {asked.repeats}")
                texts[engine.name], took = engine.decode(prompts[:batch], max_tokens)
                seconds[engine.name].append(took)
        plain = statistics.median(seconds[engines[0].name])
        for engine in engines:
            took = statistics.median(seconds[engine.name])
            calls, hook = (
                now - was for now, was in zip(engine.hook(), hooks[engine.name], strict=True)
            )
            rows.append(
                {
                    "name": engine.name,
                    "batch": batch,
                    **labels,
                    "tokens_per_second": batch * max_tokens / took,
                    "speedup": plain / took,
                    "same_text": texts[engine.name] == texts[engines[0].name],
                    "seconds": seconds[engine.name],
                    "hook_ms": 1000 * hook / calls if calls else None,
                }
            )
    return rows


def _run_emulated(
    asked: Asked, rows: list[Row], batches: Sequence[int], *, save: Callable[[], None]
) -> None:
    """Append the rows of each link. `save` is called after each."""
    folder = stand_in_in(asked.home / "models")
    overrides = {"architectures": ["PacelineEmulated"], "hidden_size": 64, "head_dim": 64}
    keywords = _keywords(
        folder,
        max(batches),
        hf_overrides=overrides,
        load_format="dummy",
        max_num_batched_tokens=2048,
    )
    environ = {
        "PACELINE_EMULATED_TARGET": TARGET,
        "PACELINE_EMULATED_DRAFT_MS": str(DRAFT_MS),
        "PACELINE_EMULATED_ACCEPTANCE": str(ACCEPTANCE),
    }
    source = random.Random(1)
    prompts = [
        [source.randrange(NUM_RESERVED, VOCAB_SIZE) for _ in range(PROMPT)]
        for _ in range(max(batches))
    ]
    turns = {**_HOOK, "model": "paceline_vllm.emulated.DraftsInTurns", "num_speculative_tokens": 5}
    rtts = RTTS_MS[1:2] if asked.quick else RTTS_MS
    policies = POLICIES[1:] if asked.quick else POLICIES
    with ExitStack() as stack:
        links = emulated_pair(TARGET, DRAFTER, rtts_ms=rtts, guesses=[GUESS], num_targets=0)
        pair = stack.enter_context(links)
        peers = [_Engine("plain", keywords, environ, asked.folder)]
        if not asked.quick:
            own = {**keywords, "speculative_config": _NGRAM}
            peers.append(_Engine("ngram", own, environ, asked.folder))
            # Our hook, whose drafters are all gone: nobody listens there.
            gone = f"127.0.0.1:{free_ports(1)[0]}"
            peers.append(_Engine("drafters gone", keywords, environ, asked.folder, drafters=gone))
        own = {**keywords, "speculative_config": turns}
        peers.append(_Engine("draft_model in turns", own, environ, asked.folder))
        for peer in peers:
            stack.enter_context(peer)
        for rtt_ms in rtts:
            with ExitStack() as of_link:
                (address,) = pair.drafters(rtt_ms, GUESS, 1).values()
                ours = [
                    of_link.enter_context(
                        _Engine(one, keywords, environ, asked.folder, drafters=address, policy=one)
                    )
                    for one in policies
                ]
                rows += _measure(
                    asked,
                    [*peers, *ours],
                    prompts,
                    batches,
                    max_tokens=asked.max_tokens,
                    labels={"part": "emulated", "rtt_ms": rtt_ms},
                )
                save()


def _run_demo(asked: Asked) -> list[Row]:
    """vLLM on this CPU with the demo model, and the demo's drafter beside it."""
    target, draft = (resolve_model(name, home=asked.home) for name in ("demo", "demo-draft"))
    keywords = _keywords(target.folder, 1)
    source = random.Random(1)
    prompts = [[source.randrange(1000, 40000) for _ in range(PROMPT)]]
    arguments = [str(draft.folder), "--weights", draft.weights, "--port", "0"]
    process = WorkerProcess(
        "workers.drafting.drafter", arguments, log=asked.folder / "demo-drafter.log"
    )
    with ExitStack() as stack:
        stack.callback(process.end)
        address = process.addresses(1)[0]
        engines = [
            _Engine("plain", keywords, {}, asked.folder),
            _Engine("ngram", {**keywords, "speculative_config": _NGRAM}, {}, asked.folder),
            _Engine("chain", keywords, {}, asked.folder, drafters=address, policy="chain"),
        ]
        for engine in engines:
            stack.enter_context(engine)
        labels = {"part": "demo", "rtt_ms": 0.0}
        return _measure(asked, engines, prompts, (1,), max_tokens=64, labels=labels)


def run_vllm(asked: Asked) -> Document:
    if not VLLM_PYTHON.exists():
        raise UnavailableError("vLLM's environment .venv-vllm is not there; run: make vllm")
    batches = tuple(asked.batch or (BATCHES[:1] if asked.quick else BATCHES))
    parts = asked.part or (PARTS[:1] if asked.quick else PARTS)
    rows: list[Row] = []
    document: Document = {
        "emulated": "emulated" in parts,
        "acceptance": ACCEPTANCE,
        "hit_rate": HIT_RATE,
        "rows": rows,
    }
    if "emulated" in parts:
        _run_emulated(asked, rows, batches, save=lambda: asked.save(document))
    if "demo" in parts:
        rows += _run_demo(asked)
        asked.save(document)
    return document


def show_vllm(console: Console, document: Document) -> None:
    rows = [
        {
            **row,
            "shown": "EMULATED" if row["part"] == "emulated" else row["part"],
            "hook_ms": "-" if row["hook_ms"] is None else row["hook_ms"],
        }
        for row in document["rows"]
    ]
    whole_table(console, table(COLUMNS, rows, left=2), optional=("hook ms",))
    if any(row["part"] == "emulated" for row in rows):
        console.print(
            f"EMULATED: vLLM and our drafters are real processes; passes take the times of the "
            f"profiles {TARGET} and {DRAFTER}, and guesses are right at the rate {ACCEPTANCE}",
            highlight=False,
        )


register(
    Suite(
        name="vllm",
        about="drafters inside the real vLLM, an emulated 70B pair and the demo pair",
        run=run_vllm,
        show=show_vllm,
        amounts={"max_tokens": (192, 192), "repeats": (3, 1)},
        parts=PARTS,
        batches=BATCHES,
    )
)
