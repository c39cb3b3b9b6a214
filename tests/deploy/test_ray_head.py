"""What our own Ray head is started with."""

from __future__ import annotations

import pytest

from deploy import ray_head


@pytest.mark.parametrize("gpus", [False, True])
def test_gpus_are_kept_from_ray_unless_they_are_wanted(gpus: bool) -> None:
    head = ray_head.RayHead("here:1", "token", "/tmp/x", (1, 2, 3))
    command = ray_head._command(head, num_cpus=2, gpus=gpus)
    assert ("--num-gpus=0" in command) is not gpus
