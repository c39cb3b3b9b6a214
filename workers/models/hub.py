"""Models by their names on Hugging Face's hub: "org/name", or "org/name@REVISION".

huggingface_hub downloads them into its own cache (HF_HOME, HF_HUB_CACHE), which other programs use
too, and reads its own variables (HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE). A model that is complete
in the cache is used without asking the hub, so that a worker which starts again has the same files,
also without a network. No code and no pickle file is downloaded.
"""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError, ModelFetchError
from workers.models.fetch import FetchProgress, Progress

_NAME = re.compile(r"(?P<repo>\w[\w.-]{0,95}/\w[\w.-]{0,95})(@(?P<revision>\w[\w./-]{0,199}))?")
_WANTED = ["*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model"]
_UNWANTED = ["*/*"]
"""Folders in a repository hold other formats of the same weights."""


def is_hub_name(name: str) -> bool:
    """Whether a model's name has the form of one on the hub. A folder may be named so too."""
    return _NAME.fullmatch(name) is not None


def repository_of(name: str) -> str:
    return name.partition("@")[0]


def snapshot_of(name: str, progress: Progress, *, renew: bool = False) -> Path:
    """The folder of a model with such a name. It is downloaded unless it is complete in the cache.

    `renew`: ask the hub what the revision is now. Raises CheckpointError if there is no such model,
    ModelFetchError if the hub cannot be reached.
    """
    from huggingface_hub import constants, errors, snapshot_download

    found = _NAME.fullmatch(name)
    assert found is not None
    wanted: dict[str, Any] = {
        "repo_id": found["repo"],
        "revision": found["revision"],
        "allow_patterns": _WANTED,
        "ignore_patterns": _UNWANTED,
    }
    try:
        if not renew:
            try:
                return Path(snapshot_download(**wanted, local_files_only=True))
            except (errors.LocalEntryNotFoundError, errors.IncompleteSnapshotError):
                pass
        progress(FetchProgress("downloading"))
        return Path(snapshot_download(**wanted, tqdm_class=_bars_for(progress)))
    except errors.RevisionNotFoundError:
        raise CheckpointError(
            f"model {name!r}: the repository {found['repo']} has no revision "
            f"{found['revision'] or 'main'!r}; give a branch, a tag or a commit"
        ) from None
    except (errors.RepositoryNotFoundError, errors.GatedRepoError):
        raise CheckpointError(
            f"model {name!r} is neither a folder here nor a repository that {constants.ENDPOINT} "
            "gives to this user; check the name, or set HF_TOKEN if it is private or gated"
        ) from None
    except Exception as error:  # Of huggingface_hub, its HTTP client, or the system.
        why = str(error).strip().partition("\n")[0] or type(error).__name__
        cause = error.__cause__
        if isinstance(error, errors.LocalEntryNotFoundError) and cause is not None:
            why = str(cause).strip().partition("\n")[0]
        raise ModelFetchError(
            f"model {name!r} is not a folder here, and could not be fetched from "
            f"{constants.ENDPOINT}: {why}. Without a network: run `hf download {found['repo']} "
            "--local-dir FOLDER` where there is one, copy FOLDER to each host that has a worker, "
            "and give its path as the model"
        ) from error


def _bars_for(progress: Progress) -> Any:
    """A class in place of tqdm's that tells `progress` the bytes instead of showing them."""
    from tqdm.std import tqdm

    class Bar(tqdm):  # type: ignore[misc]  # tqdm has no types
        def __init__(self, *args: Any, **given: Any) -> None:
            given.pop("name", None)
            super().__init__(*args, **given | {"file": io.StringIO(), "disable": False})

        def update(self, n: float | None = 1) -> bool | None:
            shown: bool | None = super().update(n)
            if self.unit == "B" and self.total:
                progress(FetchProgress("downloading", int(self.n), int(max(self.n, self.total))))
            return shown

    return Bar
