"""vLLM with our drafters has the text of vLLM without speculation."""

from __future__ import annotations

import json
import time
import urllib.request

import pytest

from tests.vllm.conftest import World, random_prompts
from tests.vllm.servers import VllmServer, differences

MIB = 1024 * 1024


def _drafted(server: VllmServer) -> tuple[float, float]:
    """Candidates that vLLM verified, and those that it accepted."""
    drafted = server.metric("vllm:spec_decode_num_draft_tokens_total")
    return drafted, server.metric("vllm:spec_decode_num_accepted_tokens_total")


@pytest.mark.parametrize("which", ["ours", "ranks"])
def test_greedy_text_is_vllms_own(world: World, which: str) -> None:
    """With one rank and with two; the first tensor-parallel rank alone has drafters."""
    server = world.ours if which == "ours" else world.ranks
    accepted, rounds = 0.0, 0
    while accepted < 50:  # On a busy host a chain may come late, for known prompts always.
        prompts = random_prompts(8, seed=1 + rounds)
        expected = world.plain.ask_all(prompts, at_once=4, max_tokens=48, ignore_eos=True)
        answers = server.ask_all(prompts, at_once=4, max_tokens=48, ignore_eos=True)
        assert differences(world.plain, prompts, expected, answers) == []
        _, accepted = _drafted(server)
        rounds += 1
        assert rounds < 20, f"{accepted} candidates were accepted: nothing was shown"
    if which == "ranks":
        assert server.said.count("is in use") == 1, "another rank has drafters too"


def test_vllm_counts_what_we_count(world: World) -> None:
    server, before = world.ours, _accepted_by_both(world.ours)
    vllms, ours = 0.0, 0.0
    for number in range(20):  # On a busy host a chain may come late.
        server.ask_all(random_prompts(4, seed=20 + number), at_once=4, max_tokens=32)
        vllms, ours = (
            now - was for now, was in zip(_accepted_by_both(server), before, strict=True)
        )
        if vllms >= 20:
            break
    assert vllms >= 20, "nothing was shown"
    assert abs(ours - vllms) <= 0.05 * vllms
    assert server.metric("paceline:vllm_hook_failed_total", own=True) == 0


def _accepted_by_both(server: VllmServer) -> tuple[float, float]:
    """Candidates that were accepted, as vLLM counts them and as we do."""
    time.sleep(0.5)  # vLLM writes its metrics after the answer.
    own = server.metric("paceline:spec_decode_num_accepted_tokens_total", own=True)
    return _drafted(server)[1], own


def test_several_choices_stop_strings_and_a_grammar(world: World) -> None:
    prompts = random_prompts(6, seed=3, longest=20)
    for prompt in prompts:
        same = world.ours.ask(prompt, n=3, max_tokens=24, temperature=1e-3)
        assert len(same) == 3
        plain = world.plain.ask(prompt, max_tokens=24)
        assert world.ours.ask(prompt, max_tokens=24) == plain  # It ends where plain text ends.
    choice = {"structured_outputs": {"choice": ["yes it is", "no it is not"]}}
    for prompt in prompts:
        expected = world.plain.ask(prompt, max_tokens=24, **choice)
        assert world.ours.ask(prompt, max_tokens=24, **choice) == expected


def test_requests_that_are_aborted_leave_nothing_behind(world: World) -> None:
    for prompt in random_prompts(8, seed=4, longest=20):
        body = {"model": world.ours.name, "prompt": prompt, "max_tokens": 150, "stream": True}
        request = urllib.request.Request(
            f"http://127.0.0.1:{world.ours.port}/v1/completions",
            json.dumps({**body, "ignore_eos": True}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.readline()
    _no_sequence_is_left(world.ours)


def _no_sequence_is_left(server: VllmServer) -> None:
    give_up = time.monotonic() + 15
    while server.metric("paceline:num_requests_running", own=True):
        assert time.monotonic() < give_up, "sequences are left at the drafter"
        time.sleep(0.2)


@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.long)])
def test_preempted_requests(world: World, count: int) -> None:
    """Mixed lengths, 32 at a time, in KV that does not hold them."""
    prompts = random_prompts(count, seed=5, longest=60)
    lengths = [20 + number % 80 for number in range(count)]
    before = world.ours.metric("vllm:num_preemptions_total")

    def ask(server: VllmServer, some: int) -> list[list[int]]:
        return server.ask_all(
            prompts[:some], at_once=32, max_tokens=lengths[:some], ignore_eos=True
        )

    servers = (world.plain, world.ours)
    for server in servers:
        ask(server, 100)
    processes = (*servers, world.drafter)
    memory = [one.memory for one in processes]
    expected, answers = (ask(server, count) for server in servers)
    grown = [one.memory - was for one, was in zip(processes, memory, strict=True)]
    if count >= 1000:  # vLLM itself keeps something of each request.
        assert max(grown[1] - grown[0], grown[2]) < 20 * MIB, f"bytes more: {grown}"
    assert differences(world.plain, prompts, expected, answers) == []
    assert world.ours.metric("vllm:num_preemptions_total") - before > 0, "nothing was preempted"
    _no_sequence_is_left(world.ours)
