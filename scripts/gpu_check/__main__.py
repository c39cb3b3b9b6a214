"""Runs all checks of one GPU, each in a process of its own: `scripts/gpu_check.sh`.

    scripts/gpu_check.sh --out FOLDER              # what is not done yet; goes on after a failure
    scripts/gpu_check.sh --out FOLDER --minutes 9  # begin nothing that may take longer than that
    scripts/gpu_check.sh --out FOLDER --only c d   # the steps whose names begin so
    scripts/gpu_check.sh --cpu --out FOLDER        # a dry run: tiny shapes, no GPU

FOLDER/gpu_check.json has, for each step, `status`, `why`, `seconds`, `figures` (the step's own
JSON) and the end of its `output`. It is written after each step, and a later call goes on from it:
first with steps that have no result, then with those that failed. FOLDER/gpu_check.log has all
output. The exit code is 1 unless all chosen steps are done that the number of GPUs permits.

This file needs Python's standard library only. It names all missing packages before the first step;
steps that need one of them are not run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
_OUTPUT_LINES = 60
_FIGURES = "{figures}"
"""In a command: the file for the step's JSON."""
_FOLDER = "{folder}"
"""In a command: _LARGE."""
_LARGE = Path(tempfile.gettempdir()) / "paceline_gpu_check"
"""The folder of the pair: its checkpoints, and the logs of its workers."""
_DISTRIBUTIONS = {
    "_pytest": "pytest",
    "google.protobuf": "protobuf",
    "google.rpc": "googleapis-common-protos",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "pytest_asyncio": "pytest-asyncio",
    "pytest_timeout": "pytest-timeout",
    "xdist": "pytest-xdist",
    "yaml": "pyyaml",
}
"""Where a package has another name than its module."""
_KERNELS = ("numpy", "torch", "triton")
_WIRE = ("grpc", "grpc_health", "grpc_reflection", "google.protobuf", "google.rpc")
_ENGINE = (*_KERNELS, "psutil", "safetensors", "transformers")
_PAIR = (
    *(*_ENGINE, *_WIRE, "pydantic", "pydantic_core", "annotated_types", "typing_inspection"),
    *("rich", "markdown_it", "mdurl", "pygments", "jinja2", "yaml", "llguidance"),
    *("tokenizers", "typer", "annotated_doc", "click", "shellingham"),
)
_TESTS = (
    *(*_PAIR, "pytest", "_pytest", "pytest_asyncio", "pytest_timeout", "xdist"),
    *("execnet", "iniconfig", "pluggy", "hypothesis", "sortedcontainers"),
)


@dataclass(frozen=True, slots=True)
class Step:
    """A check. `command` and `dry` (in a dry run) follow the name of the Python program.

    `seconds`: when it is ended. `needs`: modules. `program`: runs Python, if not in a dry run.
    `gpus`: how many it needs.
    """

    name: str
    command: Sequence[str]
    dry: Sequence[str]
    seconds: int
    needs: Sequence[str]
    program: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    gpus: int = 1


def steps() -> list[Step]:
    """All steps, in order."""
    kernels = ("-m", "scripts.check_kernels")
    measure = ("-m", "scripts.gpu_check.measurements")
    tiny = ("--shape", "tiny", "--cpu")

    def check(name: str, seconds: int) -> Step:
        needs = _ENGINE if name == "layers" else _KERNELS
        command = (*kernels, name)
        return Step(f"a-{name}", command, (*command, "--cpu"), seconds, needs)

    def measured(name: str, what: str, seconds: int, needs: Sequence[str], *more: str) -> Step:
        whole = (*measure, what, _FIGURES)
        return Step(name, (*whole, *more), (*whole, *tiny), seconds, needs)

    def sanitized(check: str, tool: str, seconds: int) -> Step:
        return Step(
            f"i-{tool}-{check}",
            (*kernels, check, "--small"),
            (*kernels, check, "--cpu"),
            seconds,
            _ENGINE if check == "layers" else _KERNELS,
            ("compute-sanitizer", "--tool", tool, "--error-exitcode", "9"),
            # Otherwise a block of torch's allocator hides accesses beyond a tensor's end.
            {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        )

    tests = (
        "-m",
        "pytest",
        "-m",
        "gpu",
        "--kernels",
        "-q",
        "-W",
        "default",
        "-p",
        "no:cacheprovider",
    )
    long_contexts = ("--context", "4096", "--context", "16384")
    eight = ("--shape", "8b", "--rounds", "40")
    float8_kv = (*measure, "steps", _FIGURES, "--kv-cache-dtype", "fp8")
    float8_weights = (*measure, "steps", _FIGURES, "--float8-weights")
    rank = ("--shape", "70b-rank", "--rounds", "40", "--batch", "1", "--batch", "16")
    loading = ("-m", "scripts.loading_speed", "--json", _FIGURES)
    profile = ("scripts/measure_profile.py",)
    pair = ("scripts/gpu_pair.py", _FOLDER, "--json-file", _FIGURES, "--quick")
    small_pair = ("--device", "cpu", "--layers", "2", "--draft-layers", "1", "--hidden", "128")
    return [
        measured("machine", "machine", 90, ("numpy", "torch")),
        check("layers", 150),
        check("choice", 120),
        check("attention", 200),
        Step(
            "b-tests",
            (*tests, "tests/workers", "tests/deploy/bench/test_bench_engine_gpu.py"),
            (*tests, "tests/workers/engine/cuda/test_gpu.py"),
            420,
            _TESTS,
        ),
        measured("c-8b", "steps", 300, _ENGINE, *eight, "--context", "512", *long_contexts),
        Step(
            "c-8b-fp8-kv", (*float8_kv, *eight, *long_contexts), (*float8_kv, *tiny), 240, _ENGINE
        ),
        Step("c-8b-fp8-weights", (*float8_weights, *eight), (*float8_weights, *tiny), 200, _ENGINE),
        measured("d-70b-rank", "steps", 200, _ENGINE, *rank),
        measured("d-70b-rank-no-graphs", "steps", 200, _ENGINE, *rank, "--no-graphs"),
        measured("e-replay-8b", "replay", 120, _ENGINE, "--shape", "8b"),
        measured("e-replay-1b", "replay", 90, _ENGINE, "--shape", "1b"),
        Step(
            "e-loading",
            (*loading, "--gib", "4"),
            (*loading, "--gib", "0.1"),
            150,
            _ENGINE,
        ),
        *(
            Step(
                f"f-profile-{shape}",
                (*profile, shape, _FIGURES),
                (*profile, "tiny", _FIGURES, "--cpu"),
                seconds,
                _ENGINE,
            )
            for shape, seconds in (("8b", 240), ("1b", 150))
        ),
        Step(
            "g-pair",
            pair,
            (*pair, *small_pair, "--vocab", "300", "--tokens", "16"),
            500,
            _PAIR,
        ),
        measured("h-meeting-1b", "meeting", 120, _ENGINE, "--shape", "1b"),
        measured("h-meeting-70b-rank", "meeting", 200, _ENGINE, "--shape", "70b-rank"),
        sanitized("choice", "memcheck", 200),
        sanitized("layers", "memcheck", 200),
        sanitized("attention", "memcheck", 200),
        sanitized("attention", "racecheck", 200),
        Step(
            "j-ranks-of-gpus",
            (*tests, "tests/workers/engine/parallel"),
            (*tests, "tests/workers/engine/parallel/test_device_ranks.py"),
            300,
            _TESTS,
            gpus=2,
        ),
    ]


def num_gpus() -> int:
    """The GPUs that a step sees."""
    code = "import torch; print(torch.cuda.device_count())"
    status, output = _run_within(90, [sys.executable, "-c", code], {})
    return int(output.split()[-1]) if status == 0 else 0


def missing_of(modules: Sequence[str]) -> list[str]:
    """The modules that this Python lacks."""

    def lacks(name: str) -> bool:
        try:
            return importlib.util.find_spec(name) is None
        except ModuleNotFoundError:  # the package around it
            return True

    return [one for one in dict.fromkeys(modules) if lacks(one)]


class Checks:
    """The results of all steps, kept in FOLDER/gpu_check.json."""

    def __init__(self, folder: Path, *, dry_run: bool) -> None:
        self._folder = folder
        self._file = folder / "gpu_check.json"
        self._dry_run = dry_run
        self.results: dict[str, dict[str, Any]] = {}
        if self._file.exists():
            before = json.loads(self._file.read_text(encoding="utf-8"))
            if before["dry_run"] == dry_run:
                self.results = before["steps"]
        folder.mkdir(parents=True, exist_ok=True)

    def is_done(self, step: Step) -> bool:
        return bool(self.results.get(step.name, {}).get("status") == "done")

    def pending(self, chosen: Sequence[Step]) -> list[Step]:
        """Those that are not done; steps without a result come first."""
        left = [step for step in chosen if not self.is_done(step)]
        return sorted(left, key=lambda step: step.name in self.results)

    def run(self, step: Step) -> None:
        """Run a step to its end, whatever happens, and write its result."""
        began = time.monotonic()
        result = self._run(step)
        result["seconds"] = round(time.monotonic() - began, 1)
        self._keep(step, result)

    def leave_out(self, step: Step, why: str) -> None:
        """Write that this machine cannot run a step."""
        self._keep(step, {"status": "not run", "why": why, "seconds": 0.0})

    def _keep(self, step: Step, result: dict[str, Any]) -> None:
        self.results[step.name] = result
        document = {"dry_run": self._dry_run, "steps": self.results}
        written = self._file.with_suffix(".part")
        written.write_text(json.dumps(document, indent=1), encoding="utf-8")
        written.replace(self._file)
        why = f": {result['why']}" if result["why"] else ""
        print(f"{step.name}: {result['status']}, {result['seconds']} s{why}", flush=True)

    def _run(self, step: Step) -> dict[str, Any]:
        missing = missing_of(step.needs)
        program = () if self._dry_run else step.program
        missing += [one for one in program[:1] if shutil.which(one) is None]
        if missing:
            return {"status": "not run", "why": f"missing: {', '.join(missing)}"}
        figures = self._folder / f"{step.name}.figures"
        figures.unlink(missing_ok=True)
        names = {_FIGURES: str(figures), _FOLDER: str(_LARGE)}
        command = [
            *program,
            sys.executable,
            *(names.get(one, one) for one in (step.dry if self._dry_run else step.command)),
        ]
        status, output = _run_within(step.seconds, command, step.environment)
        with (self._folder / "gpu_check.log").open("a", encoding="utf-8") as log:
            log.write(f"=== {step.name}: {' '.join(command)}\n{output}\n")
            if status != 0 and _FOLDER in step.command:
                for file in sorted(_LARGE.glob("*.log")):
                    text = file.read_text(encoding="utf-8", errors="replace")
                    log.write(f"--- {file.name}\n{text}\n")
        lines = output.splitlines()
        why = ""
        if status is None:
            why = f"ended after {step.seconds} s"
        elif status:
            why = f"exit code {status}: {lines[-1] if lines else 'no output'}"
        return {
            "status": "done" if status == 0 else "failed",
            "why": why[:400],
            "figures": _read(figures),
            "output": lines[-_OUTPUT_LINES:],
        }


def _read(figures: Path) -> object:
    """What a step wrote: JSON, or the text of a profile. A step that was ended wrote a part."""
    if not figures.exists():
        return None
    text = figures.read_text(encoding="utf-8")
    figures.unlink()
    try:
        return json.loads(text)
    except ValueError:
        return text


def _run_within(
    seconds: int, command: Sequence[str], environment: Mapping[str, str]
) -> tuple[int | None, str]:
    """The exit code and the output. None: the process and all that it started had to be ended."""
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
    }
    process = subprocess.Popen(
        command,
        cwd=_ROOT,
        env={**os.environ, **settings, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return None, output
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise


def _say_what_is_missing(chosen: Sequence[Step]) -> None:
    modules = missing_of([one for step in chosen for one in step.needs])
    if modules:
        names = sorted({_DISTRIBUTIONS.get(one, one.replace("_", "-")) for one in modules})
        print(
            f"missing packages: {' '.join(names)}. Steps that need them are not run. On a machine "
            "with a network, `python -m pip download --no-deps --only-binary=:all: -d wheels "
            f"--python-version {sys.version_info[0]}.{sys.version_info[1]} NAMES` fetches them; "
            "begin with --wheels wheels",
            flush=True,
        )


def main() -> int:
    """Run the chosen steps; returns the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/gpu_check.sh")
    parser.add_argument("--out", type=Path, default=Path("gpu_check"), metavar="FOLDER")
    parser.add_argument("--cpu", action="store_true", help="a dry run with tiny shapes")
    parser.add_argument("--only", nargs="+", default=[""], metavar="STEP", help="names' beginnings")
    parser.add_argument("--minutes", type=float, help="begin no step that may end later")
    parser.add_argument("--list", action="store_true", help="print the steps and their limits")
    given = parser.parse_args()
    chosen = [step for step in steps() if step.name.startswith(tuple(given.only))]
    if not chosen:
        parser.error(f"--only: expected some of {', '.join(step.name for step in steps())}")
    if given.list:
        for step in chosen:
            print(f"{step.name}: at most {step.seconds} s")
        return 0
    _say_what_is_missing(chosen)
    checks = Checks(given.out, dry_run=given.cpu)
    most = max(step.gpus for step in chosen)
    present = most if given.cpu or most == 1 else num_gpus()
    for step in [step for step in chosen if step.gpus > max(present, 1)]:
        checks.leave_out(step, f"needs {step.gpus} GPUs, there are {present}")
        chosen.remove(step)
    end = None if given.minutes is None else time.monotonic() + 60 * given.minutes
    for step in checks.pending(chosen):
        if end is not None and time.monotonic() + step.seconds > end:
            print(f"{step.name}: not begun, it may take {step.seconds} s", flush=True)
        else:
            checks.run(step)
    left = [step.name for step in chosen if not checks.is_done(step)]
    print(
        f"{len(chosen) - len(left)} of {len(chosen)} steps done"
        + (f"; left: {', '.join(left)}" if left else "")
    )
    return int(bool(left))


if __name__ == "__main__":
    sys.exit(main())
