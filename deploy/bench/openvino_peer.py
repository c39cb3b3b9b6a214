"""Runs OpenVINO GenAI's decoding in another process, with exactly the weights of our target.

    python -m deploy.bench.openvino_peer convert FOLDER CONVERTED WEIGHTS [...]
    python -m deploy.bench.openvino_peer serve CONVERTED DTYPE THREADS [lookup | DRAFT]

`convert` traces Hugging Face's model code with its KV as inputs and outputs, and makes that KV the
state of an OpenVINO model. So every checkpoint of a plain decoder with a causal mask works, and
no float is rounded. The packages are the extra `openvino` of paceline-server.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

from deploy.bench.processes import LineProcess
from deploy.bench.transformers_peer import Answer, PeerContender
from paceline.errors import UnavailableError
from workers.process.lines import answer_lines

PACKAGES = ("openvino_genai", "openvino_tokenizers", "nncf")
"""What this peer imports. nncf rounds a draft model's weights."""

PROMPT_LOOKUP = "lookup"
"""Stands for the folder of a draft model: the pipeline drafts by prompt lookup."""

OPENVINO_DRAFT, OPENVINO_LOOKUP = "openvino-draft", "openvino-lookup"
OPENVINO_CANDIDATES: Mapping[str, Sequence[int]] = {
    OPENVINO_DRAFT: (2, 3, 4, 5),
    OPENVINO_LOOKUP: (3, 5, 8),
}
"""Numbers of candidates that OpenVINO GenAI's rows try. The second is taken without trying."""

MAX_NGRAM = 3
"""Longest suffix that prompt lookup searches for, as in OpenVINO's examples."""

Weights = Literal["float32", "int8"]
WEIGHTS: tuple[Weights, ...] = get_args(Weights)
"""Forms in which a converted model holds its weights. int8: rows of 8 bits, with a scale each."""

_MODEL = "openvino_model.xml"
_COPIED = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
_PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}


def is_installed() -> bool:
    """Whether the extra `openvino` is installed."""
    return all(find_spec(package) is not None for package in PACKAGES)


def convert_checkpoints(wanted: Sequence[tuple[Path, Path, Weights]], *, log: Path) -> None:
    """Convert checkpoints in a process of its own: from a folder, to a folder, in this form.

    Keeps what an earlier call made there. Raises UnavailableError with the end of the log if a
    conversion fails.
    """
    missing = [one for one in wanted if not (one[1] / _MODEL).exists()]
    if not missing:
        return
    with log.open("wb") as output:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "deploy.bench.openvino_peer", "convert"),
                *(str(argument) for one in missing for argument in one),
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=_without_network(),
            check=False,
        )
    if done.returncode:
        said = log.read_text(encoding="utf-8", errors="replace").strip()[-400:]
        folders = ", ".join(str(folder) for folder, _, _ in missing)
        raise UnavailableError(f"OpenVINO cannot convert {folders}: {said}")


class OpenVinoProcess(LineProcess):
    """The process as its user sees it. Raises UnavailableError with the reason if it has ended."""

    def __init__(
        self,
        converted: Path,
        *,
        threads: int,
        log: Path,
        dtype: str = "float32",
        draft: Path | str | None = None,
    ) -> None:
        """`draft`: the folder of a converted draft model, or PROMPT_LOOKUP; None: plain decoding.

        `dtype`: float32, or bfloat16, in which the pipeline then computes and keeps its KV.
        """
        self.threads, self.dtype = threads, dtype
        helper = () if draft is None else (str(draft),)
        super().__init__(
            "deploy.bench.openvino_peer",
            ("serve", str(converted), dtype, str(threads), *helper),
            threads=threads,
            log=log,
        )

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        num_assistant_tokens: int | None = None,
        ignore_eos: bool = False,
    ) -> Answer:
        """Continue every prompt greedily, all prompts as one batch.

        `num_assistant_tokens`: candidates of a step; None: plain decoding.
        """
        answer = self.ask(
            {
                "prompts": [list(prompt) for prompt in prompts],
                "max_tokens": max_tokens,
                "num_assistant_tokens": num_assistant_tokens,
                "ignore_eos": ignore_eos,
            }
        )
        return Answer(tuple(tuple(ids) for ids in answer["token_ids"]), answer["seconds"])


def openvino_row(name: str, process: OpenVinoProcess, candidates: int | None) -> PeerContender:
    """A pipeline of OpenVINO GenAI. `candidates`: of a step; None: plain decoding."""
    helped = "" if candidates is None else f"{candidates} candidates; "
    generate = partial(process.generate, num_assistant_tokens=candidates)
    return PeerContender(name, f"{helped}{process.dtype}, {process.threads} threads", generate)


def _without_network() -> dict[str, str]:
    """The environment of a process that neither fetches a model nor reports its use."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "OPENVINO_TELEMETRY_OPT_OUT": "1"}


class _PastKv:
    """The cache that Hugging Face's attention layers append to, as plain tensors."""

    is_compileable = False

    def __init__(self, pairs: list[list[Any]]) -> None:
        self.pairs = pairs

    def get_seq_length(self, layer: int = 0) -> Any:
        """Tokens in the cache."""
        return self.pairs[layer][0].shape[2]

    def update(self, keys: Any, values: Any, layer: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Append the keys and values of a layer's new tokens; returns all of them."""
        import torch

        pair = self.pairs[layer]
        pair[:] = [torch.cat([pair[0], keys], dim=2), torch.cat([pair[1], values], dim=2)]
        return pair[0], pair[1]


def convert(folder: str, converted: str, weights: str) -> None:
    """Write the OpenVINO model of a checkpoint, and its tokenizer, which every pipeline asks for.

    The model has the inputs and outputs that optimum-intel gives such models.
    """
    import nncf
    import openvino
    import torch
    from openvino._offline_transformations import apply_make_stateful_transformation
    from openvino_tokenizers import convert_tokenizer
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, made = Path(folder), Path(converted)
    made.mkdir(parents=True, exist_ok=True)
    model: Any = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, attn_implementation="sdpa"
    )
    config = model.config
    heads = config.num_key_value_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    num_past = 2 * config.num_hidden_layers

    class Step(torch.nn.Module):
        """One pass: token ids and the KV before them; logits and the KV after them."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model.eval()

        def forward(
            self, input_ids: Any, attention_mask: Any, position_ids: Any, *past: Any
        ) -> tuple[Any, ...]:
            cache = _PastKv([list(pair) for pair in zip(past[::2], past[1::2], strict=True)])
            count, total = input_ids.shape[1], attention_mask.shape[1]
            queries = torch.arange(total - count, total)[:, None]
            causal = torch.arange(total)[None, :] <= queries
            mask = causal[None, None] & attention_mask.bool()[:, None, None, :]
            logits = self.model(
                input_ids=input_ids,
                attention_mask=mask,
                position_ids=position_ids,
                past_key_values=cache,
            ).logits
            return (logits, *(one for pair in cache.pairs for one in pair))

    example = (
        torch.tensor([[1, 2]]),
        torch.ones(1, 5, dtype=torch.int64),
        torch.tensor([[3, 4]]),
        *(torch.zeros(1, heads, 3, size) for _ in range(num_past)),
    )
    with torch.no_grad():
        traced = torch.jit.trace(Step(), example, check_trace=False)
    made_of: Any = openvino.convert_model(traced, example_input=example)
    kinds = [f"{layer}.{part}" for layer in range(num_past // 2) for part in ("key", "value")]
    past = [f"past_key_values.{kind}" for kind in kinds]
    present = [f"present.{kind}" for kind in kinds]
    of_tokens = ("input_ids", "attention_mask", "position_ids")
    for number, (port, name) in enumerate(zip(made_of.inputs, (*of_tokens, *past), strict=True)):
        shape = [-1, -1] if number < len(of_tokens) else [-1, heads, -1, size]
        port.get_tensor().set_names({name})
        port.get_node().set_partial_shape(openvino.PartialShape(shape))
    for port, name in zip(made_of.outputs, ("logits", *present), strict=True):
        port.get_tensor().set_names({name})
    _reorder_past(made_of, past)
    made_of.validate_nodes_and_infer_types()
    apply_make_stateful_transformation(made_of, dict(zip(past, present, strict=True)))
    _begin_empty(made_of, heads, size)
    if weights == "int8":
        made_of = nncf.compress_weights(made_of, mode=nncf.CompressWeightsMode.INT8_ASYM)
    text_models = convert_tokenizer(AutoTokenizer.from_pretrained(source), with_detokenizer=True)
    for name, one in zip(("tokenizer", "detokenizer"), text_models, strict=True):
        openvino.save_model(one, made / f"openvino_{name}.xml")
    for name in _COPIED:
        if (source / name).exists():
            shutil.copy(source / name, made / name)
    # Last, so that a conversion that broke off is not taken for a whole one.
    openvino.save_model(made_of, made / _MODEL, compress_to_fp16=False)


def _reorder_past(made_of: Any, past: Sequence[str]) -> None:
    """Let an input `beam_idx` choose the rows of the state, as pipelines expect."""
    import openvino
    from openvino import opset13

    rows: Any = opset13.parameter([-1], openvino.Type.i32, name="beam_idx")
    rows.output(0).get_tensor().set_names({"beam_idx"})
    made_of.add_parameters([rows])
    for name in past:
        state = made_of.input(name)
        users = state.get_target_inputs()
        chosen = opset13.gather(state, rows, opset13.constant(0))
        for user in users:
            user.replace_source_output(chosen.output(0))


def _begin_empty(made_of: Any, heads: int, size: int) -> None:
    """Give every state its first value, no tokens, by which pipelines recognize KV."""
    import openvino
    from openvino import opset13

    rows = opset13.gather(
        opset13.shape_of(made_of.input("input_ids")), opset13.constant([0]), opset13.constant(0)
    )
    shape = opset13.concat([rows, opset13.constant([heads, 0, size], openvino.Type.i64)], axis=0)
    empty = opset13.broadcast(opset13.constant(0.0, openvino.Type.f32), shape)
    for node in made_of.get_ops():
        if node.get_type_name() == "ReadValue":
            node.set_arguments([empty.output(0)])
    made_of.validate_nodes_and_infer_types()


def load(
    converted: str, dtype: str, threads: str, draft: str = ""
) -> Callable[[Mapping[str, Any]], Mapping[str, object]]:
    """Load a pipeline. Returns the function that answers a task."""
    import numpy as np
    import openvino
    import openvino_genai

    precision = _PRECISIONS[dtype]
    properties: dict[str, Any] = {
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision,
        "INFERENCE_NUM_THREADS": int(threads),
    }
    helped: dict[str, Any] = {}
    if draft == PROMPT_LOOKUP:
        helped["prompt_lookup"] = True
    elif draft:
        helped["draft_model"] = openvino_genai.draft_model(draft, "CPU", **properties)
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_batched_tokens = 4096  # A prompt is read in one step, as transformers does.
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        Path(converted), scheduler, "CPU", {**properties, **helped}
    )

    def answer(task: Mapping[str, Any]) -> Mapping[str, object]:
        config = pipeline.get_config()
        config.do_sample = False
        config.max_new_tokens = task["max_tokens"]
        config.ignore_eos = task["ignore_eos"]
        if task["num_assistant_tokens"] is not None:
            config.num_assistant_tokens = task["num_assistant_tokens"]
            if draft == PROMPT_LOOKUP:
                config.max_ngram_size = MAX_NGRAM
        prompts = [openvino.Tensor(np.array([one], dtype=np.int64)) for one in task["prompts"]]
        start = time.perf_counter()
        results = pipeline.generate(prompts, [config] * len(prompts))
        seconds = time.perf_counter() - start
        token_ids = [[int(one) for one in result.m_generation_ids[0]] for result in results]
        return {"token_ids": token_ids, "seconds": seconds}

    return answer


if __name__ == "__main__":
    verb, *arguments = sys.argv[1:]
    if verb == "convert":
        for first in range(0, len(arguments), 3):
            convert(*arguments[first : first + 3])
    else:
        answer_lines(lambda: load(*arguments))
