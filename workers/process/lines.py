"""A process that answers each line of JSON on stdin with a line of JSON on stdout."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any


def answer_lines(
    make_answer: Callable[[], Callable[[Mapping[str, Any]], Mapping[str, object]]],
) -> None:
    """Answer the tasks of stdin until stdin ends.

    `make_answer` is called after stdout is redirected, so that no output of a library mixes with
    the answers.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    answer = make_answer()
    for line in sys.stdin:
        answers.write(json.dumps(answer(json.loads(line))) + "\n")
        answers.flush()
