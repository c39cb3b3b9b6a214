"""lm-eval, unchanged, over HTTP: the same scores and answers with speculation as without.

It runs where the package `lm-eval` is installed (`pip install lm-eval tenacity aiohttp`), which is
some 400 MB. The task and its data are files of this test.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cluster.driver.fitting import Speculation
from tests.cluster.gateway.serving import running_gateway
from tests.cluster.system import Checkpoints, make_checkpoints, running_system

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is not installed"),
]

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "rain"]
CHOICE = """
task: local_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
WRITE = """
task: local_write
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: " fox"
generation_kwargs: {{until: ["dog"], max_gen_toks: 24, temperature: 0.0, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return make_checkpoints(tmp_path_factory.mktemp("models"))


def _documents() -> list[dict[str, Any]]:
    draw = random.Random(3)
    return [
        {
            "question": " ".join(draw.choices(WORDS, k=8)),
            "choices": [" ".join(draw.choices(WORDS, k=draw.randint(1, 3))) for _ in "abc"],
            "answer": number % 3,
        }
        for number in range(12)
    ]


def _write_tasks(folder: Path) -> None:
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in _documents()))
    for name, task in {"choice": CHOICE, "write": WRITE}.items():
        (folder / f"{name}.yaml").write_text(task.format(data=data))


async def _evaluate(
    folder: Path, checkpoints: Checkpoints, speculation: Speculation
) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """The scores, and each task's answers, of a system that decodes in this way."""
    out = folder / speculation.policy
    drafters = {"d0": checkpoints.drafter}
    async with (
        running_system(checkpoints, drafters=drafters, speculation=speculation) as system,
        running_gateway([system.server.address]) as served,
    ):
        model = f"model=target,base_url={served.url}/v1/completions,num_concurrent=4"
        tokenizer = f"tokenizer={checkpoints.target},tokenizer_backend=huggingface,max_length=500"
        arguments = {
            "--model": "local-completions",
            "--model_args": f"{model},{tokenizer}",
            "--tasks": "local_choice,local_write",
            "--include_path": str(folder),
            "--output_path": str(out),
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "lm_eval",
            *[part for pair in arguments.items() for part in pair],
            "--log_samples",
            env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hub")},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        told, _ = await process.communicate()
        assert process.returncode == 0, told.decode()[-4000:]
        drafted = (await system.client.stats()).drafted
    assert (drafted > 0) == (speculation.policy != "off")
    (results,) = out.rglob("results_*.json")
    samples = {}
    for name in ("local_choice", "local_write"):
        (file,) = out.rglob(f"samples_{name}_*.jsonl")
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        samples[name] = [row["resps"] for row in sorted(rows, key=lambda row: row["doc_id"])]
    return json.loads(results.read_text())["results"], samples


async def test_scores_and_answers_are_those_of_plain_decoding_and_transformers(
    tmp_path: Path, checkpoints: Checkpoints
) -> None:
    _write_tasks(tmp_path)
    plain = await _evaluate(tmp_path, checkpoints, Speculation(policy="off"))
    drafted = await _evaluate(tmp_path, checkpoints, Speculation(policy="lockstep", window=4))
    assert drafted == plain
    scores, samples = plain
    assert scores["local_choice"]["acc,none"] > 0
    _check_with_transformers(checkpoints.target, samples["local_choice"])


def _check_with_transformers(folder: Path, answers: list[Any]) -> None:
    """The sums of log probabilities are those of a forward pass of transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for document, told in zip(_documents(), answers, strict=True):
        for choice, [[logprob, is_greedy]] in zip(document["choices"], told, strict=True):
            context = len(tokenizer(document["question"])["input_ids"])
            ids = tokenizer(f"{document['question']} {choice}")["input_ids"]
            with torch.no_grad():
                rows_TV = model(torch.tensor([ids])).logits[0].log_softmax(dim=-1)
            rows = [rows_TV[i - 1] for i in range(context, len(ids))]
            expected = sum(float(row[i]) for row, i in zip(rows, ids[context:], strict=True))
            assert float(logprob) == pytest.approx(expected, abs=1e-4)
            greedy = all(int(row.argmax()) == i for row, i in zip(rows, ids[context:], strict=True))
            assert str(is_greedy) == str(greedy)
