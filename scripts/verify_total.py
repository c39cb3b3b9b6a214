"""The total over the figures that `paceline verify --json` wrote into a folder.

    scripts/verify_total.py FOLDER

Exit code 1: a divergence, or a row that failed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def total(reports: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Counts over all reports. Prompts are counted once a file, tokens in every run."""
    prompts: dict[str, int] = {}
    counts = dict.fromkeys(
        (
            *("runs", "tokens", "divergences", "ties", "failed_rows"),
            *("transformers_tokens", "transformers_divergences", "transformers_ties"),
        ),
        0,
    )
    for report in reports:
        for file in report["files"]:
            prompts[file["input"]] = max(prompts.get(file["input"], 0), file["rows"])
            for run in file["runs"]:
                counts["runs"] += 1
                counts["tokens"] += run["tokens"]
                counts["ties"] += run["ties"]
                counts["divergences"] += len(run["divergences"]) - run["ties"]
                counts["failed_rows"] += len(run["failed_rows"])
            if (peer := file["transformers"]) is not None:
                differ = len(peer["divergences"]) + len(peer["rows_with_other_prompt_tokens"])
                counts["transformers_tokens"] += peer["tokens"]
                counts["transformers_ties"] += peer["ties"]
                counts["transformers_divergences"] += differ - peer["ties"]
    return {"prompts": sum(prompts.values()), **counts}


def main(folder: Path) -> int:
    """Print the total; the exit code."""
    reports = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    counts = total(reports)
    for name, count in counts.items():
        print(f"{name.replace('_', ' ')}: {count}")
    wrong = ("divergences", "transformers_divergences", "failed_rows")
    return 1 if any(counts[name] for name in wrong) else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
