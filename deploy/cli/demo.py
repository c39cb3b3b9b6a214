"""`paceline demo`: fetches the models, starts a local cluster, answers, and shows the gain."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from deploy.cli.options import ConfigOption, ServerOption, check_at_least_one
from deploy.cli.reach import reach_cluster
from deploy.rows.measure import Sample, acceptance_length, measure, median_busy
from deploy.terminal.lines import whole_table
from deploy.terminal.token_printer import MAX_WIDTH, STYLES, TokenPrinter
from paceline.chat import Message
from paceline.client import Client
from paceline.errors import InvalidRequestError
from paceline.generation import Chunk
from paceline.options import GenerateOptions
from paceline.text import counted
from workers.emulated.profiles import EMULATED

QUESTION = "Why is the sky blue? Explain it to a curious child."
POLICIES = ("off", "chain")
RULE = "coupled"
"""The rule that promises the tokens of plain decoding. The demo shows that they are the same."""
WARM_UP_TOKENS = 8
REPEATS = 3


def answer(console: Console, client: Client, question: str, options: GenerateOptions) -> None:
    """Stream the answer to a question onto the console."""
    console.print(Text(f"Q: {question}", "bold"), soft_wrap=True)
    printer = TokenPrinter(console)
    for event in client.stream([Message("user", question)], options):
        if isinstance(event, Chunk):
            printer.add(event)
    printer.close()
    if console.is_terminal:
        legend = Text.assemble(
            "\n",
            ("drafted and accepted", STYLES["draft"]),
            "   ",
            ("the target's own", STYLES["target"]),
        )
        console.print(legend)


def compare(
    client: Client, question: str, options: Mapping[str, GenerateOptions]
) -> dict[str, list[Sample]]:
    """Samples of one request under each policy, taken in turns."""
    samples: dict[str, list[Sample]] = {name: [] for name in options}
    for _ in range(REPEATS):
        for name, one in options.items():
            samples[name].append(measure(client, [Message("user", question)], one))
    return samples


def comparison_table(samples: Mapping[str, Sequence[Sample]]) -> Table:
    """Speed, acceptance length and busy devices of each policy, in at most 80 columns."""
    busy = {name: median_busy(ones) for name, ones in samples.items()}
    devices = list(dict.fromkeys(device for shares in busy.values() for device in shares))
    speeds = {
        name: statistics.median(sample.tokens_per_second for sample in ones)
        for name, ones in samples.items()
    }
    table = Table(box=None, pad_edge=False, width=None)
    table.add_column("")
    for heading in ("tokens/s", "ratio", "tokens/step", *(f"{name} busy" for name in devices)):
        table.add_column(heading, justify="right")
    for name, ones in samples.items():
        length = acceptance_length(ones)
        table.add_row(
            "plain decoding" if name == "off" else f"speculation ({name})",
            f"{speeds[name]:.1f}",
            f"{speeds[name] / speeds['off']:.2f}",
            "" if length is None else f"{length:.2f}",
            *(f"{busy[name].get(device, 0.0):.0%}" for device in devices),
        )
    return table


def why_slower(samples: Mapping[str, Sequence[Sample]]) -> str | None:
    """Why speculation was slower than plain decoding, in words; None: it was not."""
    speeds, steps_ms = {}, {}
    for name, ones in samples.items():
        speeds[name] = statistics.median(one.tokens_per_second for one in ones)
        steps_ms[name] = statistics.median(1000 * one.seconds / (one.steps or 1) for one in ones)
    fastest = max(speeds, key=lambda name: speeds[name])
    if fastest != "off":
        return None
    beside = max(ms for name, ms in steps_ms.items() if name != "off")
    return (
        f"Speculation was slower here: a step took {steps_ms['off']:.0f} ms in plain decoding and "
        f"{beside:.0f} ms with a drafter at work. Target and drafter compute at once, so each "
        "needs cores that nothing else keeps busy."
    )


def cores_and_load() -> str:
    """The host's cores and its load in the last minute, in words."""
    cores = len(os.sched_getaffinity(0))
    return f"This host has {counted(cores, 'core')}; its load was {os.getloadavg()[0]:.1f}."


def where_measured(model: str) -> str:
    """Where the figures were measured, in words. `model`: its name at the server."""
    if model.startswith(EMULATED):
        return f"EMULATED devices ({model.removeprefix(EMULATED)})"
    return "this machine's processor"


def add_commands(app: typer.Typer, environ: Mapping[str, str]) -> None:
    """Add `demo` to the command tree."""

    @app.command()
    def demo(
        prompt: Annotated[str, typer.Option(help="The question to answer.")] = QUESTION,
        max_tokens: Annotated[int, typer.Option(help="Maximum tokens of the answer.")] = 96,
        config_path: ConfigOption = None,
        server: ServerOption = None,
    ) -> None:
        """Fetch the demo models, start a local cluster, answer a question and measure."""
        from cluster.config.load import load_config

        if not prompt:
            raise InvalidRequestError("prompt", "is empty; ask a question")
        check_at_least_one("max-tokens", max_tokens)
        config = load_config(config_path, environ)
        console = Console(highlight=False)
        errors = Console(stderr=True)
        options = {
            policy: GenerateOptions(policy=policy, rule=RULE, seed=0, max_tokens=max_tokens)
            for policy in POLICIES
        }
        with (
            reach_cluster(config, environ, console=errors, server=server) as address,
            Client(address) as client,
        ):
            for policy in POLICIES:
                warm_up = GenerateOptions(
                    policy=policy, rule=RULE, seed=0, max_tokens=WARM_UP_TOKENS
                )
                measure(client, [Message("user", prompt)], warm_up)
            answer(console, client, prompt, options["chain"])
            with errors.status("measuring"):
                samples = compare(client, prompt, options)
            model = client.describe().model
        console.print()
        whole_table(console, comparison_table(samples))
        texts = {sample.token_ids for ones in samples.values() for sample in ones}
        same = "the same tokens" if len(texts) == 1 else "DIFFERENT tokens (a defect)"
        console.print(
            f"\nBoth gave {same}. Medians of {REPEATS} runs in turns, prompt included, on "
            f"{where_measured(model)}.\nShares are of time spent in forward passes.",
        )
        slower = why_slower(samples)
        if slower is not None:
            host = "" if server is not None or model.startswith(EMULATED) else cores_and_load()
            console.print(f"{slower} {host}".rstrip(), width=MAX_WIDTH)
        raise typer.Exit(0 if len(texts) == 1 else 1)
