"""The measurements of scripts/gpu_check.sh that have no program of their own.

`python -m scripts.gpu_check.measurements WHAT FILE --shape SHAPE` writes JSON into FILE:

- `machine`: the device, versions, and whether torch's varlen_attn has block tables.
- `steps`: times of the engine's steps (engine.py). FILE has each row once it is there.
- `replay`: the kernels of one captured step: calls and microseconds by name.
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
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

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
    """What the command line asks for. Tiny on a CPU."""
    from scripts.gpu_check.engine import SHAPES, GpuTask

    task = GpuTask(
        device,
        SHAPES[given.shape].config,
        torch.bfloat16,
        contexts=given.context or (512,),
        rounds=given.rounds,
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
    """Steps of an engine: a row for each batch and window."""
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
    """Steps of a group of one rank: stepped, aborted, met again."""
    import gc

    from paceline.errors import PacelineError
    from scripts.gpu_check.engine import random_info, random_model
    from workers.engine.cuda.engine import CudaEngine, CudaOptions
    from workers.engine.parallel.group import RankGroup
    from workers.engine.parallel.sharding import SummedOutput
    from workers.engine.parallel.weight_cuts import Place
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
    right = all(
        found[name]["same_bits"] and "WRONG" not in found[name]["after_an_abort"]
        for name in ("first meeting", "second meeting")
    )
    if not right:
        found["verdict"] = "WRONG"
    return found


_WAYS: dict[str, Callable[[argparse.Namespace, torch.device], dict[str, Any]]] = {
    "machine": lambda _, device: machine(device),
    "steps": measure_steps,
    "replay": replay,
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
