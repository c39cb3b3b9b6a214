"""What a worker does not need it does not import: the code of models takes seconds."""

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
        # A drafter that looks n-grams up.
        ("import workers.drafting.drafter", {"torch", "transformers"}),
        # A driver, and workers that replay.
        (
            "import sys, cluster.driver.service, workers.emulated.drafter\n"
            "from pathlib import Path\n"
            "from cluster.driver.driver import read_checkpoint\n"
            "read_checkpoint(Path(sys.argv[1]))",
            {_MODELS},
        ),
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
