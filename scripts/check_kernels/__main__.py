"""Check our GPU kernels against torch's operations, and time both; from the repository's root:

    python -m scripts.check_kernels attention       # also: layers, choice; one after the other
    python -m scripts.check_kernels choice --cpu    # a dry run: tiny sizes, Triton's interpreter

A line a case: what it compares, what was found, and the seconds that the case took. WRONG stands
where kernels break what they promise, FAILED where a case raised; the exit status is then 1. Other
figures are for the reader. `us`: microseconds of one call in a CUDA graph, the median of its
replays; each after the name of who computes: `kernels`, or `torch`, which is the engine as it is
with target.kernels = false. What a check's own words mean its module says (attention.py, layers.py,
choice.py). An error of the device ends all that follows in a process, so each check has its own.

A dry run shows that the cases run. It times nothing.
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
    given = parser.parse_args()
    # Before triton is imported, which reads it once.
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

    from scripts.check_kernels.cases import run

    module = importlib.import_module(f"scripts.check_kernels.{given.check}")
    with torch.inference_mode():
        return run(module.make_cases(device), device)


if __name__ == "__main__":
    sys.exit(main())
