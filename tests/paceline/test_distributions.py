"""The two distributions: what their wheels hold, and the client's alone in an empty environment."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import venv
from email.parser import HeaderParser
from importlib.metadata import distribution
from pathlib import Path, PurePath
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
CLIENT = ("paceline",)
SERVER = ("cluster", "deploy", "workers")
CALLER = """
import sys
import paceline
with paceline.Client(sys.argv[1]) as client:
    print(client.generate("hello").text)
try:
    import workers
except ModuleNotFoundError:
    print("no workers")
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheels, built from a copy because setuptools leaves files in the folder it builds."""
    folder = tmp_path_factory.mktemp("distributions")
    for name in (*CLIENT, *SERVER, "paceline-server"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    pip(
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        "out",
        ".",
        "./paceline-server",
        cwd=folder,
    )
    return {path.name.partition("-")[0]: path for path in (folder / "out").iterdir()}


def pip(*arguments: str, cwd: Path | None = None) -> None:
    command = [sys.executable, "-m", "pip", *arguments, "--no-index", "--disable-pip-version-check"]
    subprocess.run(command, cwd=cwd, check=True, capture_output=True, timeout=240)


def metadata(wheel: Path) -> dict[str, list[str]]:
    with ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        message = HeaderParser().parsestr(archive.read(name).decode())
    return {key: message.get_all(key, []) for key in message}


def required(wheel: Path) -> dict[str, Requirement]:
    """Requirements of a wheel, without extras."""
    all_of_them = map(Requirement, metadata(wheel)["Requires-Dist"])
    return {one.name: one for one in all_of_them if "extra" not in str(one.marker)}


@pytest.mark.parametrize(("name", "packages"), [("paceline", CLIENT), ("paceline_server", SERVER)])
def test_a_wheel_holds_all_files_of_its_packages_and_nothing_else(
    wheels: dict[str, Path], name: str, packages: tuple[str, ...]
) -> None:
    files = [path for package in packages for path in (ROOT / package).rglob("*") if path.is_file()]
    made = (".pyc", ".so")  # by Python, and by workers/engine/cpu/native.py
    expected = {path.relative_to(ROOT).as_posix() for path in files if path.suffix not in made}
    with ZipFile(wheels[name]) as archive:
        held = archive.namelist()
    assert {one for one in held if ".dist-info/" not in one} == expected
    assert any(one.endswith(".dist-info/licenses/LICENSE") for one in held)


def test_the_client_needs_grpc_and_protobuf_and_the_server_needs_the_client(
    wheels: dict[str, Path],
) -> None:
    assert required(wheels["paceline"]).keys() == {"grpcio", "protobuf"}
    [version] = metadata(wheels["paceline"])["Version"]
    assert metadata(wheels["paceline_server"])["Version"] == [version]
    assert str(required(wheels["paceline_server"])["paceline"].specifier) == f"=={version}"
    project = tomllib.loads((ROOT / "paceline-server" / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"paceline": "deploy.cli.__main__:main"}


def link(name: str, folder: Path) -> None:
    """Link an installed distribution and all its requirements into a folder."""
    installed = distribution(name)
    for file in installed.files or []:
        if ".." not in file.parts and "__pycache__" not in file.parts:
            path = folder / PurePath(file)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(Path(str(installed.locate_file(file))))
    for requirement in map(Requirement, installed.requires or []):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            link(requirement.name, folder)


def test_the_client_works_where_nothing_else_is_installed(
    wheels: dict[str, Path], tmp_path: Path, address: str
) -> None:
    venv.create(tmp_path / "empty", symlinks=True)
    python = tmp_path / "empty" / "bin" / "python"
    [site_packages] = (tmp_path / "empty" / "lib").glob("python*/site-packages")
    pip("--python", str(python), "install", "--no-deps", str(wheels["paceline"]))
    assert {path.name for path in site_packages.iterdir() if path.suffix != ".dist-info"} == {
        "paceline"
    }
    # What pip would fetch from an index.
    for name in required(wheels["paceline"]):
        link(name, tmp_path / "fetched")
    (site_packages / "fetched.pth").write_text(str(tmp_path / "fetched"))
    done = subprocess.run(
        [python, "-c", CALLER, address],
        cwd=tmp_path, env={}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.stdout.splitlines(), done.stderr) == (["hé!", "no workers"], "")
