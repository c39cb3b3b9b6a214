"""The image: its lock file has what the distributions declare, and its Dockerfile is sound."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.k8s.chart import ROOT

DOCKERFILE = (ROOT / "k8s/docker/Dockerfile").read_text()


def locked() -> dict[str, str]:
    """The version of each package in the lock file."""
    lines = (ROOT / "k8s/docker/lock.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    assert all(len(pair) == 2 for pair in pairs)
    found = {str(canonicalize_name(name)): version for name, version in pairs}
    assert len(found) == len(pairs)
    return found


@pytest.mark.parametrize("project", ["pyproject.toml", "paceline-server/pyproject.toml"])
def test_the_lock_file_has_a_fitting_version_of_each_package(project: str) -> None:
    declared = tomllib.loads((ROOT / project).read_text())["project"]
    asked = [*declared["dependencies"], *declared.get("optional-dependencies", {}).get("serve", ())]
    # constraints.txt has torch's version; our own are the checkout's; pip is the image's.
    others = {"torch", "paceline", "paceline-server", "pip"}
    versions = locked()
    for one in map(Requirement, asked):
        name = canonicalize_name(one.name)
        if name not in others:
            assert name in versions, f"{name} is not in k8s/docker/lock.txt"
            assert one.specifier.contains(versions[name]), (str(one), versions[name])


def stages() -> dict[str, list[str]]:
    """The instructions of each stage, by its name."""
    lines = DOCKERFILE.replace("\\\n", " ").splitlines()
    found: dict[str, list[str]] = {}
    for line in (one for one in lines if one and not one.startswith("#")):
        if line.startswith("FROM "):
            found[line.split()[-1]] = []
        if found:
            list(found.values())[-1].append(line)
    return found


def test_what_is_copied_is_there_and_what_is_installed_is_pinned() -> None:
    for lines in stages().values():
        for line in lines:
            if line.startswith("COPY ") and "--from=" not in line:
                *sources, _ = line.split()[1:]
                assert all((ROOT / source).exists() for source in sources), line
            if "pip install" in line:
                assert "-c k8s/docker/lock.txt" in line
                assert "--no-cache-dir" in line
            assert "sudo" not in line
            assert not re.match(r"ADD ", line)


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_each_target_is_without_root_and_without_the_stage_that_builds(target: str) -> None:
    found = stages()
    (begin, copy) = found[target]
    base = found[begin.split()[1]]
    users = [line for line in base if line.startswith("USER ")]
    assert users == ["USER 10001:10001"]
    assert re.fullmatch(rf"COPY --from=build-{target} /opt/paceline /opt/paceline", copy)
    assert any(line.startswith("HEALTHCHECK ") for line in base)
    assert all(":latest" not in line for lines in found.values() for line in lines)


def test_the_chart_and_the_lock_file_have_one_version_of_ray() -> None:
    values = (Path(ROOT) / "k8s/paceline/values.yaml").read_text()
    found = re.search(r"^ray:\n  version: (\S+)", values, re.MULTILINE)
    assert found is not None
    assert found[1] == locked()["ray"]
