"""A rank that loads takes little more memory than it holds in the end."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.release import at_release
from tests.workers.engine.packed_checkpoints import float8

MOST = 1.3
"""Upper bound on the peak, as a multiple of what the rank holds in the end."""

PROGRAM = """
import sys
from pathlib import Path
import torch
import transformers.models.llama.modeling_llama
from workers.engine.load.model import load_on_cpu
from workers.engine.parallel.group import RankGroup
from workers.engine.parallel.weight_cuts import Place

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

torch.set_num_threads(1)
rank, degree = int(sys.argv[2]), int(sys.argv[3])
group = RankGroup(Place(rank, degree), host="127.0.0.1") if degree > 1 else None
told = []
before = peak()
model = load_on_cpu(Path(sys.argv[1]), "float32", group, lambda *now: told.append(now))
taken = peak() - before
tensors = {}
for module in model.modules():
    for value in [*vars(module).values(), *module._parameters.values()]:
        if isinstance(value, torch.Tensor):
            tensors[id(value)] = value.numel() * value.element_size()
print(taken, sum(tensors.values()), *told[-1])
"""


@pytest.fixture(scope="module")
def float8_folder(demo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with linears in float8, scaled by row, as compressed-tensors writes them."""
    folder = tmp_path_factory.mktemp("float8")
    for path in demo_folder.glob("*.json"):
        shutil.copy(path, folder)
    tensors = load_file(demo_folder / "model.safetensors")
    for name in [one for one in tensors if one.endswith("_proj.weight")]:
        scales = tensors[name].abs().amax(dim=1, keepdim=True) / 448
        tensors[name] = (tensors[name] / scales).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = scales
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = dict(float8("channel").quantization)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.long
@pytest.mark.parametrize(
    ("made", "rank", "degree"),
    [
        ("float8_folder", 1, 2),
        *at_release([("demo_folder", 0, 1), ("demo_folder", 1, 2), ("float8_folder", 0, 1)]),
    ],
)
def test_the_peak_is_near_what_is_held(
    request: pytest.FixtureRequest, made: str, rank: int, degree: int
) -> None:
    """The peak excludes Python and its libraries.

    The demo's embedding is tied, so it is also held as a packed LM head. Loading a whole model
    first would take twice the share at degree 2.
    """
    folder: Path = request.getfixturevalue(made)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), str(rank), str(degree)],
        capture_output=True,
        text=True,
        check=True,
    )
    taken, held, loaded, to_load = map(int, done.stdout.split())
    assert 0.9 * held < taken < MOST * held
    assert loaded == to_load < held
