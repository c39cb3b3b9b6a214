"""Check our GPU kernels against torch's operations, and time both; from the repository's root:

    python -m scripts.check_kernels attention       # also: layers, choice; one after the other
    python -m scripts.check_kernels choice --cpu    # a dry run: tiny sizes, Triton's interpreter
    python -m scripts.check_kernels choice --small  # tiny sizes on a GPU: for compute-sanitizer

Each case prints one line: what it compares, what it found, and the seconds that it took. The line
has WRONG if kernels break a promise, and FAILED if the case raised an error; the exit status is
then 1. All other figures only inform. `us`: microseconds of one call in a CUDA graph, the median of
its replays, after `kernels` (ours) or `torch` (the engine with target.kernels = false). The module
of each check explains its other words (attention.py, layers.py, choice.py). After an error of the
device, a process cannot use the device any more, so each check runs in a process of its own.

A dry run shows that the cases run. With tiny sizes no times are measured.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys

CHECKS = ("attention", "layers", "choice")


def main() -> int:
    """Run one check; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m scripts.check_kernels")
    parser.add_argument("check", choices=CHECKS)
    parser.add_argument("--cpu", action="store_true", help="tiny sizes, by Triton's interpreter")
    parser.add_argument("--small", action="store_true", help="tiny sizes, on a GPU")
    given = parser.parse_args()
    # Set before triton is imported, which reads it once.
    if given.cpu:
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    from workers.process.kernels import can_run_kernels, use_kernels

    if given.cpu:
        device = torch.device("cpu")
    elif not torch.cuda.is_available():
        parser.error("needs a CUDA device, and there is none; --cpu makes a dry run without one")
    else:
        device = torch.device("cuda", torch.cuda.current_device())
        use_kernels(True)
        if not can_run_kernels(device):
            parser.error("our kernels cannot run on this host: the warning says why")

    from scripts.check_kernels.cases import measure_no_times, run

    small = given.cpu or given.small
    if small:
        measure_no_times()
    module = importlib.import_module(f"scripts.check_kernels.{given.check}")
    with torch.inference_mode():
        return run(module.make_cases(device, small=small), device)


if __name__ == "__main__":
    sys.exit(main())
