"""The registry of rules: what it holds, what it refuses, and a rule of another package."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.errors import ConfigError
from tests.recipes import recipes
from tests.workers.verification.enumeration import (
    KINDS,
    TinyModels,
    committed_law,
    drawn_chains,
    is_exact,
    rule_node,
    unordered_trees,
)
from workers.verification.rule import RULES, CandidateKind, Promise, Rule, rule_named
from workers.verification.rules.one_hot import OneHotNode

ROOT = Path(__file__).resolve().parents[3]
RECIPE = recipes()["A verification rule"]
PAGE = (ROOT / "docs" / "rules.md").read_text()


def test_every_file_is_one_rule() -> None:
    folder = ROOT / "workers" / "verification" / "rules"
    files = {path.stem.replace("_", "-") for path in folder.glob("*.py")} - {"--init--"}
    assert files == set(RULES)


def test_the_page_has_a_row_of_every_rule() -> None:
    row = r"^\| `([\w-]+)`[^|]*\|([^|]+)\|[^|]+\| (text|law) \|[^|]+\| ([^|]+) \|$"
    rows = re.findall(row, PAGE, re.MULTILINE)
    assert {name for name, *_ in rows} == set(RULES)
    for name, sent, promises, paper in rows:
        rule = rule_named(name)
        assert (promises, paper) == (rule.promise.value, rule.paper)
        assert ("draft probabilities" in sent) == rule.needs_draft_probs
        assert ("multiplicities" in sent) == rule.counts_paths


def test_reading_the_registry_imports_nothing_heavy() -> None:
    """The command line and the simulator read it."""
    program = (
        "import sys\nfrom workers.verification.rule import RULES\nprint(*RULES)\n"
        "print([name for name in ('torch', 'ray', 'grpc') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [" ".join(RULES), "[]"]


def _rule(exact_for: CandidateKind, drawn_as: CandidateKind | None, **others: Any) -> Rule:
    begin = {"begin": lambda target_probs_V, draft, num_tests: OneHotNode(target_probs_V)}
    return Rule(
        **(begin | others),
        name="made-up",
        help="for this test",
        paper="none",
        promise=Promise.LAW,
        exact_for=frozenset({exact_for}),
        drawn_as=drawn_as,
    )


def test_rules_that_contradict_themselves_are_refused() -> None:
    _rule(CandidateKind.DETERMINISTIC, None)
    with pytest.raises(ConfigError, match="'made-up': drawn_as is not in exact_for"):
        _rule(CandidateKind.DETERMINISTIC, CandidateKind.SAMPLED_CHAIN)
    with pytest.raises(ConfigError, match="'made-up': candidates with shared noise tell"):
        _rule(CandidateKind.SHARED_NOISE, None)
    with pytest.raises(ConfigError, match="'made-up': a model draws"):
        _rule(CandidateKind.DETERMINISTIC, CandidateKind.DETERMINISTIC)
    with pytest.raises(ConfigError, match="'made-up': a model's draws can be verified only with"):
        _rule(CandidateKind.SAMPLED_CHAIN, CandidateKind.SAMPLED_CHAIN)
    with pytest.raises(ConfigError, match="'made-up': candidates that were not drawn have no"):
        _rule(CandidateKind.DETERMINISTIC, None, needs_draft_probs=True)
    with pytest.raises(ConfigError, match="'made-up': without `begin`"):
        _rule(CandidateKind.SHARED_NOISE, None, needs_draft_probs=True, begin=None)


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Rule]:
    """The rule of the recipe, registered for one test."""
    monkeypatch.setattr(RULES, "_entries", dict(RULES.all()))
    RECIPE.install(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module(RECIPE.module)
    yield rule_named("kseq-fixed")
    del sys.modules["paceline_kseq_fixed"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_rule_of_the_recipe_keeps_the_law(recipe: Rule, kind: str) -> None:
    """By the same sums over drafts and coins as our own rules (test_laws.py)."""
    node, shuffled = rule_node(recipe.name), recipe.counts_paths
    for vocab_size in (2, 3, 4):
        models = TinyModels(vocab_size, kind)
        for num_paths, depth in ((1, 2), (2, 1), (3, 1), (2, 2)):
            drafts = unordered_trees(models, num_paths, depth)
            assert is_exact(models, committed_law(models, drafts, 2, node, shuffled=shuffled))
        chains = drawn_chains(models, 2)
        assert is_exact(models, committed_law(models, chains, 3, node, shuffled=shuffled))


def test_the_rule_of_the_recipe_accepts_less_than_kseq(recipe: Rule) -> None:
    """So it is another rule; were nothing accepted, it would keep the law too."""
    models = TinyModels(4, "random")
    draft = models.draft(()).exact()
    nodes = [
        rule.begin(models.target_V(()), draft, 3)
        for rule in (recipe, rule_named("kseq"))
        if rule.begin is not None
    ]
    less, more = ([node.acceptance(int(one)) for one in draft.token_ids_M] for node in nodes)
    assert 0 < np.sum(less) < np.sum(more)
