"""A worker does not import what it does not need: the code of models takes seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import make_tiny_checkpoint

_ROOT = Path(__file__).resolve().parents[3]
_MODELS = "transformers.modeling_utils"


@pytest.mark.parametrize(
    ("started", "left_alone"),
    [
        # A drafter that looks up n-grams.
        ("import workers.drafting.drafter", {"torch", "transformers"}),
        (
            "import sys, cluster.driver.service\n"
            "from pathlib import Path\n"
            "from cluster.driver.driver import read_checkpoint\n"
            "read_checkpoint(Path(sys.argv[1]))",
            {_MODELS, "torch"},
        ),
        ("import workers.emulated.drafter", {_MODELS}),
        # A shard, before it loads a model that our kernels do not run.
        ("import workers.target.shard", {"transformers", "triton"}),
    ],
)
def test_the_code_of_models_is_left_alone(
    started: str, left_alone: set[str], tmp_path: Path
) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-c", f"{started}\nimport sys\nprint(*sys.modules)"),
            str(make_tiny_checkpoint(tmp_path)),
        ],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert not left_alone & set(done.stdout.split())
