"""Checks before Ray starts whether workers can load their models. Imports torch only if needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from cluster.config.model import Config
from paceline.errors import ConfigError, VocabularyMismatchError
from workers.drafting.kind import DRAFTERS, DrafterOptions
from workers.models.catalog import CATALOG, ModelFiles


def check_workers(config: Config, files: Mapping[str, ModelFiles], *, ray_runs: bool) -> None:
    """Inspect the checkpoints. `files`: by the model names of `config`.

    `ray_runs`: workers will run on an existing Ray cluster, which may have GPUs; on a head of ours
    they compute on CPUs. Raises CheckpointError, ConfigError naming the model, or
    VocabularyMismatchError.
    """
    if not _may_be_refused(config, files):
        return
    from workers.engine.load.checkpoint import choose_length, inspect_checkpoint
    from workers.engine.load.vocabulary import digest_vocabulary, read_tokenizer

    target = config.target
    info = inspect_checkpoint(files[target.model].folder)
    longest = None if target.max_model_len == "auto" else target.max_model_len
    choose_length(longest, info.max_model_len)
    if target.emulated is None:  # else nothing is computed
        _check_engines(config, files, longest, ray_runs=ray_runs)
    for model, tokenizer in dict.fromkeys(
        (one.model, getattr(one.options_of_kind(), "tokenizer", None)) for one in config.drafters
    ):
        if model is None:
            continue
        digest = inspect_checkpoint(files[model].folder).vocabulary_digest
        if tokenizer is not None:
            digest = digest_vocabulary(read_tokenizer(tokenizer).get_vocab())
        if digest != info.vocabulary_digest:
            own = files[target.model].folder
            raise VocabularyMismatchError(
                f"drafter {model!r} does not have the vocabulary of target {target.model!r}; "
                f"choose a drafter with the target's tokenizer, or kind {_kinds_without_model()}, "
                f'or have kind "model" translate, with options = {{ tokenizer = "{own}" }}'
                if tokenizer is None
                else f"drafter {model!r}: options.tokenizer ({tokenizer}) does not have the "
                f"vocabulary of target {target.model!r}; expected a folder as {own}"
            )


def _may_be_refused(config: Config, files: Mapping[str, ModelFiles]) -> bool:
    """Whether inspection is needed. Our own models fit, unless the options are unusual."""
    target = config.target
    usual = (
        target.tensor_parallel == 1
        and target.max_model_len == target.kv_memory == "auto"
        and target.resources != "gpu"
        and target.kv_cache_dtype == "auto"
    )
    return not usual or any(name not in CATALOG for name in files)


def _check_engines(
    config: Config, files: Mapping[str, ModelFiles], longest: int | None, *, ray_runs: bool
) -> None:
    from workers.engine.open import check_ahead

    target = config.target
    kv_memory = None if target.kv_memory == "auto" else target.kv_memory
    device: Literal["cpu", "cuda"] = "cpu"
    if target.resources == "gpu":
        device = "cuda"
    elif target.resources == "auto" and ray_runs:
        # Only Ray knows whether the target gets GPUs. Its engine checks the rest.
        from workers.engine.load.model import part_config
        from workers.engine.parallel.cuts import Place

        part_config(files[target.model].folder, Place(0, target.tensor_parallel))
        return
    check_ahead(
        files[target.model].folder,
        device=device,
        weights=files[target.model].weights,
        kv_memory_bytes=kv_memory,
        dtype=target.dtype,
        kv_dtype=target.kv_cache_dtype,
        max_model_len=longest,
        degree=target.tensor_parallel,
    )
    if device == "cuda":
        return  # A drafter may be left with a CPU.
    for one in config.drafters:
        if one.model is None:
            continue
        kind = DRAFTERS.get(one.kind, field="kind")
        options = DrafterOptions(
            kind.name,
            files[one.model].folder,
            files[one.model].weights,
            kv_memory_bytes=kv_memory,
            device=device,
            of_kind=one.options_of_kind(),
        )
        try:
            kind.check(options)
        except ConfigError as error:
            raise ConfigError(f"drafter {one.model!r}: {error}") from error


def _kinds_without_model() -> str:
    return " or ".join(name for name, kind in DRAFTERS.all().items() if kind.default_model is None)
