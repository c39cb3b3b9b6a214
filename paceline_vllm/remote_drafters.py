"""The class that vLLM calls: `method: custom_class`, `model: paceline_vllm.RemoteDrafters`.

vLLM's V1 model runner makes one on each rank of the last pipeline stage and calls `propose` after
each step. The scheduler reads the proposals of the first tensor-parallel rank there, so only that
one has drafters. Candidates come without probabilities. vLLM takes them as certain ones, so that
its text, or its law at a temperature, stays its own.
"""

from __future__ import annotations

import atexit
import importlib.metadata
import logging
import os
import re
import time
from collections.abc import Iterable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cluster.decoding.reported_target import ReportedOptions
from cluster.driver.drafter_links import TargetVocabulary
from cluster.gateway.metrics import PREFIX, DriverMetrics, DriverReport
from paceline_vllm.drafting_thread import DraftingThread
from paceline_vllm.rows import Table
from paceline_vllm.settings import MOST_WAIT_MS, Settings, read_settings
from workers.engine.load.vocabulary import digest_vocabulary

OLDEST, NEWEST = (0, 26), (0, 32)
"""The versions of vLLM that this package was tried with. Others are warned about."""

_log = logging.getLogger(__name__)


class RemoteDrafters:
    """Candidates for vLLM from drafters on other devices (docs/vllm.md)."""

    def __init__(self, vllm_config: Any) -> None:
        """`vllm_config`: vLLM's VllmConfig. Raises ConfigError, which vLLM shows at its start."""
        _show_log()
        speculative = vllm_config.speculative_config
        self._most = int(speculative.num_speculative_tokens)
        settings = read_settings(os.environ, self._most)
        self._thread: DraftingThread | None = None
        self._pads = False
        self._last_failure: str | None = None
        if not _is_output_rank():
            return
        _check_version()
        vocabulary = _vocabulary_of(vllm_config.model_config)
        if vocabulary is None:
            return
        on_cpu = _computes_on_cpu()
        self._pads = settings.padding == "on" or (settings.padding == "auto" and not on_cpu)
        speculation = settings.speculation
        model = vllm_config.model_config
        self._thread = DraftingThread(
            settings,
            ReportedOptions(
                vocab_size=int(model.get_vocab_size()),
                max_model_len=int(model.max_model_len),
                policy=speculation.policy,
                window=speculation.window,
                stopping=speculation.stopping,
                drafter=speculation.drafter,
                wait_seconds=settings.wait_ms / 1000,
            ),
            vocabulary,
            max_num_seqs=int(vllm_config.scheduler_config.max_num_seqs),
            shares_host=on_cpu,
        )
        self._tell(settings)
        self._thread.start()
        atexit.register(self._thread.stop)
        if settings.metrics_port is not None:
            _serve_metrics(settings.metrics_port, vocabulary.model, self._thread)

    def load_model(self, *_: Any, **__: Any) -> None:
        """Do nothing: no model is loaded here. vLLM calls this on all drafters."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Table,
        slot_mappings: Any = None,
        **_: Any,
    ) -> list[list[int]]:
        """The candidates of the next step for each row of the batch, at most the window.

        `sampled_token_ids`: what the step committed, a list a row; an empty one for a row whose
        prompt is being read. `num_tokens_no_spec`: tokens of each row. `token_ids_cpu` (rows,
        positions): their ids. It raises nothing: on a defect vLLM decodes plainly.
        """
        thread = self._thread
        count = len(sampled_token_ids)
        if thread is None:
            return [[] for _ in range(count)]
        began = time.perf_counter()
        try:
            num_sampled = [len(one) for one in sampled_token_ids]
            lengths = num_tokens_no_spec[:count].tolist()
            found = [list(one) for one in thread.propose(lengths, token_ids_cpu, num_sampled)]
            if self._pads and any(found):
                self._pad(found, sampled_token_ids)
        except Exception as error:  # It must not end vLLM's engine.
            self._note(error)
            found = [[] for _ in range(count)]
        thread.counts.took(time.perf_counter() - began)
        return found

    def _pad(self, found: list[list[int]], sampled: Sequence[Sequence[int]]) -> None:
        """Fill the candidates of each row up to the window, because vLLM's graphs for whole steps
        are for rows of one length. A filler that is not the target's token is refused."""
        for own, committed in zip(found, sampled, strict=True):
            if committed and len(own) < self._most:
                own += [own[-1] if own else committed[-1]] * (self._most - len(own))

    def _note(self, error: Exception) -> None:
        assert self._thread is not None
        self._thread.counts.failed += 1
        said = repr(error)
        if said != self._last_failure:  # It may come back in each step.
            self._last_failure = said
            _log.exception("a defect kept drafts from a step, which decodes plainly")

    def _tell(self, settings: Settings) -> None:
        speculation = settings.speculation
        _log.warning(
            "Paceline drafts by policy %r with windows of %d from %s; a step waits at most %g ms "
            "for the lock%s%s",
            speculation.policy,
            speculation.window,
            ", ".join(settings.addresses),
            MOST_WAIT_MS,
            f" and {settings.wait_ms:g} ms for drafters" if settings.wait_ms else "",
            f"; proposals are padded to {self._most}" if self._pads else "",
        )


def _show_log() -> None:
    """Have our lines appear beside vLLM's, in its form."""
    vllm_log = logging.getLogger("vllm")
    for name in ("paceline_vllm", "cluster", "workers"):
        own = logging.getLogger(name)
        if not own.handlers:
            own.handlers = list(vllm_log.handlers)
            own.propagate = False
            own.setLevel(logging.WARNING)


def _is_output_rank() -> bool:
    """Whether vLLM's scheduler reads the proposals of this process."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    return bool(get_tp_group().rank_in_group == 0 and get_pp_group().is_last_rank)


def _computes_on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _check_version() -> None:
    """Warn about a vLLM that this package was not tried with."""
    import vllm

    found = re.match(r"(\d+)\.(\d+)", vllm.__version__)
    version = (int(found[1]), int(found[2])) if found else (0, 0)
    if not OLDEST <= version <= NEWEST:
        own = importlib.metadata.version("paceline-vllm")
        _log.warning(
            "paceline-vllm %s was tried with vLLM %d.%d to %d.%d, and this is %s; its hook for "
            "proposers may have changed",
            own,
            *OLDEST,
            *NEWEST,
            vllm.__version__,
        )


def _vocabulary_of(model_config: Any) -> TargetVocabulary | None:
    """The vocabulary of vLLM's model; None, with a warning: it is not known."""
    from vllm.tokenizers import cached_tokenizer_from_config

    try:
        tokenizer = cached_tokenizer_from_config(model_config)
        vocabulary = None if tokenizer is None else tokenizer.get_vocab()
    except Exception as error:  # Tokenizers raise many kinds.
        _log.warning("the tokenizer of vLLM's model cannot be read: %r", error)
        vocabulary = None
    if not vocabulary:
        _log.warning(
            "vLLM's model has no tokenizer here (skip_tokenizer_init?), so it cannot be compared "
            "with the drafters'; vLLM decodes plainly"
        )
        return None
    return TargetVocabulary(str(model_config.model), digest_vocabulary(vocabulary))


class VllmMetrics(Collector):
    """What drafting counts, asked of the thread when it is scraped. `model`: vLLM's name of its
    model.

    The names are those of a driver (docs/observability.md), so that its dashboards serve here too.
    What vLLM counts of speculation itself it goes on to tell on its own port.
    """

    def __init__(self, model: str, thread: DraftingThread) -> None:
        self._model, self._thread = model, thread
        self._driver = DriverMetrics()

    def collect(self) -> Iterable[Metric]:
        self._driver.take([DriverReport("vllm", self._model, self._thread.stats())])
        yield from self._driver.collect()
        counts = self._thread.counts
        counters = [
            ("vllm_hook_calls", "Calls of the hook.", counts.calls),
            ("vllm_hook_seconds", "Time that they took.", counts.seconds),
            ("vllm_hook_missed", "Calls that found the lock taken.", counts.missed),
            ("vllm_hook_failed", "Calls that a defect ended.", counts.failed),
        ]
        for name, says, value in counters:
            yield CounterMetricFamily(PREFIX + name, says, value=value)
        gauges = [
            ("vllm_hook_longest_seconds", "The longest call.", counts.longest),
            ("vllm_lock_wait_seconds", "Upper bound on a wait.", MOST_WAIT_MS / 1000),
        ]
        for name, says, value in gauges:
            yield GaugeMetricFamily(PREFIX + name, says, value=value)


def _serve_metrics(port: int, model: str, thread: DraftingThread) -> None:
    """Serve the metrics on all addresses of the host. A port that is taken is only warned about."""
    registry = CollectorRegistry()
    registry.register(VllmMetrics(model, thread))
    try:
        start_http_server(port, registry=registry)
    except OSError as error:
        _log.warning("metrics are not served on port %d: %s", port, error)
