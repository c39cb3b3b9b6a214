"""What paceline_vllm relies on in vLLM. It fails here with what changed, and not deep inside."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_hook_is_called_as_we_expect() -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    source = inspect.getsource(GPUModelRunner.propose_draft_token_ids)
    begin = source.index('method == "custom_class"')
    call = "".join(source[begin:].split("elif")[0].split())
    assert (
        "self.drafter).propose(sampled_token_ids,self.input_batch.num_tokens_no_spec,"
        "self.input_batch.token_ids_cpu,slot_mappings=slot_mappings,)" in call
    ), f"vLLM calls its proposers otherwise: {call}"


def test_the_class_is_made_from_the_whole_configuration() -> None:
    from vllm.v1.spec_decode.custom_class_proposer import create_custom_proposer

    assert list(inspect.signature(create_custom_proposer).parameters) == ["vllm_config"]


def test_the_scheduler_reads_the_first_tensor_parallel_rank_of_the_last_stage() -> None:
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    taken = inspect.getsource(MultiprocExecutor.take_draft_token_ids)
    assert "unique_reply_rank=self.output_rank" in taken
    rank = "".join(inspect.getsource(MultiprocExecutor._get_output_rank).split())
    assert "self.world_size-self.parallel_config.tensor_parallel_size" in rank


def test_what_we_ask_of_vllm_is_there() -> None:
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group
    from vllm.platforms import current_platform
    from vllm.tokenizers import cached_tokenizer_from_config

    assert callable(get_pp_group)
    assert callable(get_tp_group)
    assert callable(current_platform.is_cpu)
    assert callable(cached_tokenizer_from_config)


def test_importing_the_package_brings_neither_torch_nor_vllm() -> None:
    program = (
        "import sys, paceline_vllm;"
        "print([one for one in ('torch', 'transformers', 'ray', 'vllm') if one in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_installing_ours_moves_nothing_of_vllms(installation: list[str]) -> None:
    assert set(installation) <= {"paceline", "paceline-vllm"}
