"""The measurements of scripts/gpu_check.sh that have no program of their own.

`python -m scripts.gpu_check.measurements WHAT FILE --shape SHAPE` writes JSON into FILE:

- `machine`: the device, versions, and whether torch's varlen_attn has block tables.
- `steps`: times of the engine's steps (engine.py). FILE has each row once it is there.
- `replay`: the kernels of one captured step: calls and microseconds by name.
- `chains`: a drafter's token with the host after each pass, and by several passes without it; KV
  moved for all sequences at once, and one by one.
- `sums`: a rank on each GPU of the host: sums of a 70B Llama's rows over all ranks, in one shot and
  in two (peer_kernels.py), which must give equal bits.
- `meeting`: a group of one rank, over NCCL: steps before and after the connections were aborted
  and made again must have the bits of an engine without a group.

On torch without block tables only our own kernels attend on a GPU, so they are used.
"""

from __future__ import annotations

import argparse
import inspect
import json
import logging
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

DEVICES = {True: "cpu", False: "cuda"}


def machine(device: torch.device) -> dict[str, Any]:
    """What this machine is."""
    from importlib.metadata import PackageNotFoundError, version

    from torch.nn.attention import varlen

    def of(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    names = ("torch", "triton", "transformers", "numpy", "grpcio", "pydantic", "pytest")
    found: dict[str, Any] = {
        "python": sys.version.split()[0],
        "versions": {name: of(name) for name in names},
        "cuda": torch.version.cuda,
        "block_tables": "block_table" in inspect.signature(varlen.varlen_attn).parameters,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "device": properties.name,
            "capability": torch.cuda.get_device_capability(device),
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
        }
    return found


def make_task(given: argparse.Namespace, device: torch.device) -> Any:
    """The bench's task for the command line. Tiny on a CPU."""
    from scripts.gpu_check.engine import SHAPES, GpuTask

    task = GpuTask(
        device,
        SHAPES[given.shape].config,
        torch.bfloat16,
        contexts=given.context or (512,),
        rounds=given.rounds,
        invariant=(True,),
        graphs=not given.no_graphs,
        kv_dtype=given.kv_cache_dtype,
        float8_weights=given.float8_weights,
    )
    if given.batch:
        task = replace(task, batches=given.batch)
    if device.type == "cpu":
        task = replace(
            task,
            dtype=torch.float32,
            contexts=(40,),
            rounds=2,
            copy_bytes=1 << 16,
            product_size=64,
            batches=(1, 2),
            prefill=32,
            kv_memory_bytes=4 << 20,
        )
    return task


def measure_steps(given: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """The rows of the bench."""
    from scripts.gpu_check.engine import GpuRow, measure_gpu, ratios

    rows: list[GpuRow] = []
    document: dict[str, Any] = {}
    for row in measure_gpu(make_task(given, device), lambda line: print(line, flush=True)):
        rows.append(row)
        document = {
            "machine": machine(device),
            "rows": [one.json() for one in rows],
            "ratios": {name: {"ratio": ratio, "aim": aim} for name, ratio, aim in ratios(rows)},
        }
        given.file.write_text(json.dumps(document, indent=1), encoding="utf-8")
        print(
            f"  {row.step_ms:.3f} ms, {row.bandwidth_share:.2f} of a copy's bandwidth", flush=True
        )
    return document


def replay(given: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """The kernels of one step of each batch and window, by their total time."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    from scripts.gpu_check.engine import SHAPES, make_engine
    from workers.engine.cuda.engine import CudaOptions
    from workers.engine.kv_blocks import blocks_for
    from workers.engine.slices import Slice

    task = make_task(given, device)
    context, batches = task.contexts[0], (1, 16) if device.type == "cuda" else (1, 2)
    options = CudaOptions(
        kv_memory_bytes=task.kv_memory_bytes,
        max_model_len=task.length,
        max_num_seqs=max(batches),
        batch_invariant=SHAPES[given.shape].role == "target",  # as drafters load their models
    )
    engine = make_engine(task, options)
    on_device = DeviceType.CUDA if device.type == "cuda" else DeviceType.CPU
    found: dict[str, Any] = {"layers": task.config.num_hidden_layers}
    for batch in batches:
        for window in task.windows:
            pages = blocks_for(context + window + 1, engine.block_size)
            slices = [
                Slice(range(i * pages, (i + 1) * pages), context, [7] * (1 + window), 1 + window)
                for i in range(batch)
            ]
            milliseconds = []
            for _ in range(10):
                engine.step(slices)
                milliseconds.append(engine.forward_seconds * 1000)
            activities = [ProfilerActivity.CPU]
            if device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
                torch.cuda.synchronize()
            with profile(activities=activities) as watched:
                engine.step(slices)
                _ = engine.forward_seconds  # waits for the device
            kernels: dict[str, list[float]] = defaultdict(list)
            for event in watched.events():
                if event.device_type == on_device:
                    took = event.device_time if device.type == "cuda" else event.cpu_time
                    kernels[event.name[:120]].append(took)
            found[f"batch {batch} window {window}"] = {
                "step_ms": statistics.median(milliseconds),
                "kernels": len([one for times in kernels.values() for one in times]),
                "by_name": [
                    {"name": name, "calls": len(times), "us": round(sum(times), 1)}
                    for name, times in sorted(kernels.items(), key=lambda item: -sum(item[1]))
                ],
            }
    return found


def _median_ms(work: Callable[[], object], rounds: int) -> float:
    """Milliseconds until the device has done the work."""
    seconds = []
    for _ in range(rounds + 3):
        begin = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[3:]) * 1000


def chains(given: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Milliseconds of a drafter's token, and of moving KV. Both ways must give the same tokens."""
    from workers.engine.cuda.chains import Chain

    from paceline.sampling import SamplingParams, SequenceSpec
    from scripts.gpu_check.engine import make_engine
    from workers.engine.cuda.engine import CudaOptions
    from workers.engine.kv_blocks import blocks_for
    from workers.engine.slices import Slice
    from workers.verification.device_choice import Row, choose_tokens
    from workers.verification.staging import to_device, to_host

    task = make_task(given, device)
    window, context = 8, task.contexts[0]
    batches = (1, 4, 16) if device.type == "cuda" else (1, 2)
    options = CudaOptions(
        kv_memory_bytes=task.kv_memory_bytes,
        max_model_len=task.length,
        max_num_seqs=max(batches),
        batch_invariant=False,
        chains=True,
    )
    engine = make_engine(task, options)
    pages = blocks_for(context + window, engine.block_size)
    samplings = {"T=0": {"temperature": 0.0}, "T=1": {}, "top-p .9": {"top_p": 0.9}}
    found: dict[str, Any] = {"captured": engine.chains is not None, "tokens": window}
    for batch in batches:
        tables = [range(i * pages, (i + 1) * pages) for i in range(batch)]
        engine.step([Slice(table, 0, [7] * context, 0) for table in tables])
        for name, sampling in samplings.items():
            specs = [
                SequenceSpec(SamplingParams(**sampling), seed=seed, prompt_length=1)
                for seed in range(batch)
            ]

            def one_by_one(tables: Any = tables, specs: Any = specs) -> list[list[int]]:
                token_ids, texts = [7] * len(specs), []
                for start in range(context, context + window):
                    fed = zip(tables, token_ids, strict=True)
                    rows = [Row(spec, range(start + 1)) for spec in specs]
                    logits_TV = engine.step([Slice(table, start, [one], 1) for table, one in fed])
                    token_ids = to_host(*choose_tokens(logits_TV, rows))[0].tolist()
                    texts.append(token_ids)
                return texts

            row = {"host_after_each_ms": _median_ms(one_by_one, task.rounds) / window}
            grown = engine.chains
            if grown is not None:
                going = [
                    Chain(spec, table, context, window)
                    for spec, table in zip(specs, tables, strict=True)
                ]

                def at_once(going: Any = going, grown: Any = grown) -> list[list[int]]:
                    first = to_device(np.full(len(going), 7), device)
                    texts: list[list[int]] = to_host(*grown.extend(going, first))[0].tolist()
                    return texts

                row["at_once_ms"] = _median_ms(at_once, task.rounds) / window
                row["same_tokens"] = at_once() == one_by_one()
            found[f"batch {batch} {name}"] = row
        moves = [(table, [(context + 3, context), (context + 5, context + 1)]) for table in tables]
        found[f"batch {batch} moves"] = {
            "one_call_ms": _median_ms(lambda moves=moves: engine.move_kv(moves), task.rounds),
            "a_call_each_ms": _median_ms(
                lambda moves=moves: [engine.move_kv([one]) for one in moves], task.rounds
            ),
        }
    rows = [row for row in found.values() if isinstance(row, dict)]
    wrong = any(row.get("same_tokens") is False for row in rows)
    if wrong or (device.type == "cuda" and not found["captured"]):
        found["verdict"] = "WRONG"
    return found


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collects the warnings that workers log."""
    heard: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    listener = Listener(logging.WARNING)
    logging.getLogger("workers").addHandler(listener)
    try:
        yield heard
    finally:
        logging.getLogger("workers").removeHandler(listener)


def meeting(given: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Steps of a group of one rank: captured, aborted, met again, captured again."""
    import gc

    from paceline.errors import PacelineError
    from scripts.gpu_check.engine import random_info, random_model
    from workers.engine.cuda.engine import CudaEngine, CudaOptions
    from workers.engine.parallel.cuts import Place
    from workers.engine.parallel.group import RankGroup
    from workers.engine.parallel.sharding import SummedOutput
    from workers.engine.slices import Slice

    task = make_task(given, device)
    prompt = [(7 * number) % task.config.vocab_size for number in range(40)]
    fed = [Slice(range(1), 40, [5], 1)]
    options = CudaOptions(
        kv_memory_bytes=task.kv_memory_bytes, max_model_len=task.length, max_num_seqs=4
    )

    def steps(engine: CudaEngine) -> tuple[torch.Tensor, float]:
        engine.step([Slice(range(1), 0, prompt, 0)])
        took = []
        for _ in range(12):
            logits_TV = engine.step(fed).cpu()
            took.append(engine.forward_seconds * 1000)
        return logits_TV, statistics.median(took[2:])

    torch.manual_seed(1)
    alone = CudaEngine(random_model(task), random_info(task), options)
    expected, alone_ms = steps(alone)
    del alone
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    torch.manual_seed(1)
    model = random_model(task)
    group = RankGroup(Place(0, 1), host="127.0.0.1", device=str(device))
    for layer in model.model.layers:
        layer.self_attn.o_proj = SummedOutput(layer.self_attn.o_proj, group)
        layer.mlp.down_proj = SummedOutput(layer.mlp.down_proj, group)
    found: dict[str, Any] = {"without_a_group_ms": alone_ms}
    with _warnings() as heard:
        engine = CudaEngine(model, random_info(task), options, group=group)
        assert group.rendezvous is not None
        for name in ("first meeting", "second meeting"):
            group.meet(name, group.rendezvous)
            engine.agree()
            logits_TV, step_ms = steps(engine)
            found[name] = {"step_ms": step_ms, "same_bits": torch.equal(logits_TV, expected)}
            group.leave()
            try:
                engine.step(fed)
                found[name]["after_an_abort"] = "WRONG: a step without connections succeeded"
            except PacelineError as error:
                found[name]["after_an_abort"] = f"refused: {error}"
    group.close()
    found["warnings"] = heard
    found["captured"] = device.type == "cuda" and not any(
        "without CUDA graphs" in one for one in heard
    )
    right = all(
        found[name]["same_bits"] and "WRONG" not in found[name]["after_an_abort"]
        for name in ("first meeting", "second meeting")
    )
    if not right or (device.type == "cuda" and not found["captured"]):
        found["verdict"] = "WRONG"
    return found


SUMMED_ROWS = (1, 64, 256, 512, 1024, 2048)
SUMMED_FEATURES = 8192
"""Of a 70B Llama."""


def _sums_of_rank(rank: int, degree: int, on_cpu: bool, pipe: Any) -> None:
    """What rank 0 tells: milliseconds of a sum by rows and way, and whether bits are equal."""
    from workers.engine.parallel.cuts import Place
    from workers.engine.parallel.group import RankGroup
    from workers.process.kernels import use_kernels

    device = "cpu" if on_cpu else f"cuda:{rank}"
    if not on_cpu:
        use_kernels("auto")
        torch.cuda.set_device(rank)
    rows, features = ((2, 9), 64) if on_cpu else (SUMMED_ROWS, SUMMED_FEATURES)
    dtype, found = torch.bfloat16, {}
    group = RankGroup(Place(rank, degree), host="127.0.0.1", device=device)
    group.make_memory(features * dtype.itemsize)
    pipe.send(group.rendezvous)
    group.meet("sums", pipe.recv())
    in_kernels = group.table is not None
    generator = torch.Generator().manual_seed(rank)
    with torch.inference_mode():
        for count in rows:
            part = torch.randn(count, features, generator=generator).to(device, dtype)
            bits = []
            for name, first_row in (("one shot", 1 << 30), ("two shots", 1)):
                if in_kernels:
                    from workers.engine.parallel import peer_kernels

                    peer_kernels.TWO_SHOT_ROWS = first_row
                bits.append(group.settle(group.sum(part)))
                found[f"{count} rows, {name}, ms"] = _median_ms(
                    lambda part=part: group.sum(part), 40
                )
            found[f"{count} rows, equal"] = torch.equal(*bits)
    pipe.send({"in_kernels": in_kernels, **found})
    pipe.recv()  # all are done
    group.close()


def sums(given: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Sums over a rank on each GPU; on a CPU, over two ranks that gather."""
    import multiprocessing

    degree = torch.cuda.device_count() if device.type == "cuda" else 2
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(degree)]
    ranks = [
        context.Process(target=_sums_of_rank, args=(rank, degree, given.cpu, pipe))
        for rank, (_, pipe) in enumerate(pipes)
    ]
    for one in ranks:
        one.start()
    try:
        rendezvous, *_ = [pipe.recv() for pipe, _ in pipes]
        for pipe, _ in pipes:
            pipe.send(rendezvous)
        results = [pipe.recv() for pipe, _ in pipes]
        for pipe, _ in pipes:
            pipe.send(None)
    finally:
        for one in ranks:
            one.join(10)
            one.kill()
    found: dict[str, Any] = {"ranks": degree, **results[0]}
    equal = all(value for name, value in found.items() if name.endswith("equal"))
    if not equal or (device.type == "cuda" and not found["in_kernels"]):
        found["verdict"] = "WRONG"
    return found


_WAYS: dict[str, Callable[[argparse.Namespace, torch.device], dict[str, Any]]] = {
    "machine": lambda _, device: machine(device),
    "steps": measure_steps,
    "replay": replay,
    "chains": chains,
    "sums": sums,
    "meeting": meeting,
}


def main() -> int:
    """Measure, and write the file; returns 1 if a promise is broken."""
    parser = argparse.ArgumentParser(prog="python -m scripts.gpu_check.measurements")
    parser.add_argument("what", choices=tuple(_WAYS))
    parser.add_argument("file", type=Path)
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--context", type=int, action="append")
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--float8-weights", action="store_true")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto")
    parser.add_argument("--cpu", action="store_true", help="a dry run on tiny sizes")
    given = parser.parse_args()
    device = torch.device(DEVICES[given.cpu])
    if device.type == "cuda":
        if not torch.cuda.is_available():
            parser.error(
                "needs a CUDA device, and there is none; --cpu makes a dry run without one"
            )
        from workers.process.kernels import use_kernels

        use_kernels("auto")
        device = torch.device("cuda", torch.cuda.current_device())
    with torch.inference_mode():
        found = _WAYS[given.what](given, device)
    text = json.dumps(found, indent=1)
    given.file.write_text(text, encoding="utf-8")
    print(text[:6000])
    return int(found.get("verdict") == "WRONG")


if __name__ == "__main__":
    sys.exit(main())
