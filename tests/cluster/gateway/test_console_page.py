"""The console in a browser: what people do there, and what they see when something fails."""

from __future__ import annotations

import re
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, Page, async_playwright, expect

from cluster.access.gate import Gate
from cluster.access.keys import KeyFile, new_key
from cluster.gateway.app import Gateway
from cluster.gateway.drivers import DriverPool
from cluster.gateway.server import listen, serving
from tests.cluster.access.key_files import keys_in
from tests.cluster.gateway.serving import Served, running_gateway
from tests.cluster.system import HOST, Checkpoints, System, running_system

CHROMIUM = shutil.which("chromium-headless-shell") or shutil.which("chromium")
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: `make tools` installs it"),
]
PATIENCE_MS = 30_000
PHONE = {"width": 390, "height": 844}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox"],  # It refuses to start as root otherwise.
        )
        yield browser
        await browser.close()


Opened = Callable[..., Awaitable[Page]]


@pytest_asyncio.fixture(loop_scope="module")
async def opened(browser: Browser) -> AsyncIterator[Opened]:
    """Opens pages, each of a person of its own. Nothing may be an error or come from elsewhere.

    `may_fail`: requests of the page may, which the browser tells as an error.
    """
    faults: list[str] = []
    contexts = []
    expect.set_options(timeout=PATIENCE_MS)

    async def open_page(url: str, *, may_fail: bool = False, **options: Any) -> Page:
        context = await browser.new_context(**options)
        contexts.append(context)
        page = await context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on(
            "console",
            lambda said: (
                faults.append(said.text)
                if said.type in ("error", "warning")
                and not (may_fail and said.text.startswith("Failed to load resource"))
                else None
            ),
        )
        page.on(
            "request",
            lambda asked: (
                None if asked.url.startswith((url, "data:")) else faults.append(asked.url)
            ),
        )
        await page.goto(f"{url}/")
        return page

    yield open_page
    for context in contexts:
        await context.close()
    assert not faults


async def ask(page: Page, question: str, *, policy: str = "", tokens: int = 24) -> str:
    """Ask in the chat. Returns the text of the answer once it is whole."""
    await page.select_option("#policy", policy)
    await page.fill("#max", str(tokens))
    await page.fill("#question", question)
    await page.click("#send")
    last = page.locator(".turn.model").last
    await expect(last.locator(".told")).to_contain_text("tokens/s")
    return await last.locator(".text").inner_text()


async def test_a_chat_with_two_policies(opened: Opened, served: Served) -> None:
    page = await opened(served.url)
    await expect(page.locator("#state")).to_have_text("connected")
    await expect(page.locator("#model")).to_have_text("target")
    await expect(page.locator("#layout")).to_have_text("1 shard + 1 drafter")
    await ask(page, "Tell me of the sea.", policy="lockstep")
    answers = page.locator(".turn.model .text")
    assert await answers.first.locator(".draft").count() > 0
    assert await answers.first.locator(".target").count() > 0
    refused = answers.first.locator(".target.refused").first
    await expect(refused).to_have_attribute("title", re.compile("in place of the drafted “.+”"))
    await ask(page, "And of the wind?", policy="off")
    assert await answers.nth(1).locator(".refused").count() == 0
    assert await answers.nth(1).locator(".draft").count() == 0
    assert await answers.nth(1).locator(".target").count() > 0
    # What the devices did is in view, and stays there.
    label = r"Time line of the devices: [1-9]\d* steps? of the target, [1-9]\d* pass"
    await page.click("#zoom-out")
    await page.click("#zoom-out")
    await expect(page.locator("#line")).to_have_attribute("aria-label", re.compile(label))
    await page.click("#pause")
    await expect(page.locator("#pause")).to_have_text("Follow")
    await expect(page.locator("#positions")).to_have_attribute("aria-label", re.compile(r"\d+ %"))
    await expect(page.locator("#workers tr")).to_have_count(3)


async def test_a_race_has_the_same_tokens(opened: Opened, served: Served) -> None:
    page = await opened(served.url)
    await page.click("#tab-race")
    await page.fill("#race-max", "32")
    await page.select_option("#race-policy", "lockstep")
    await page.click("#race-go")
    await expect(page.locator("#won")).to_contain_text("the same")
    assert await page.inner_text("#fast .text") == await page.inner_text("#plain .text") != ""
    assert await page.locator("#fast .draft").count() > 0
    assert await page.locator("#plain .draft").count() == 0
    await expect(page.locator("#times")).to_contain_text("plain")


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_the_page_of_the_interface(opened: Opened, served: Served, scheme: str) -> None:
    page = await opened(served.url, viewport=PHONE, color_scheme=scheme)
    await page.goto(f"{served.url}/docs")
    chats = page.locator("details", has_text="/v1/chat/completions")
    await chats.locator("summary").click()
    await expect(chats).to_contain_text("bad_words")
    await chats.get_by_role("button").click()
    await expect(chats.locator("pre")).to_contain_text("200")
    await expect(chats.locator("pre")).to_contain_text("chat.completion")
    found = await Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
    wide = "document.documentElement.scrollWidth - window.innerWidth"
    assert await page.evaluate(wide) <= 0


async def test_two_people_at_a_time(opened: Opened, served: Served) -> None:
    pages = [await opened(served.url), await opened(served.url)]
    for number, page in enumerate(pages):
        await page.fill("#max", "40")
        await page.fill("#question", f"I am number {number}.")
    for page in pages:
        await page.click("#send")
    for number, page in enumerate(pages):
        await expect(page.locator(".turn.model .told")).to_contain_text("tokens/s")
        assert await page.locator(".turn.you").all_inner_texts() == [f"I am number {number}."]
        assert await page.locator(".turn.model").count() == 1


@asynccontextmanager
async def gateway_at(system: System, port: int = 0) -> AsyncIterator[int]:
    """A gateway at a port, which another one may have had before."""
    listener = listen(HOST, port)
    async with serving(Gateway(DriverPool([system.server.address])), listener):
        yield listener.getsockname()[1]


async def test_a_lost_connection_is_told_and_comes_back(opened: Opened, system: System) -> None:
    async with gateway_at(system) as port:
        page = await opened(f"http://{HOST}:{port}", may_fail=True)
        await expect(page.locator("#state")).to_have_text("connected")
    await expect(page.locator("#state")).to_have_text("connection lost")
    await expect(page.locator("#banner")).to_be_visible()
    await page.fill("#max", "8")
    await page.fill("#question", "Are you there?")
    await page.click("#send")
    await expect(page.locator(".turn.model .told")).to_contain_text("cannot be reached")
    async with gateway_at(system, port):
        await expect(page.locator("#state")).to_have_text("connected")
        await expect(page.locator("#banner")).to_be_hidden()
        await page.click("text=Try again")
        await expect(page.locator(".turn.model .told")).to_contain_text("8 tokens")


async def test_a_key_is_asked_for_and_kept_in_the_tab_alone(
    opened: Opened, system: System, tmp_path: Path
) -> None:
    path = tmp_path / "keys"
    keys = keys_in(path, alice={"tenant": "a"}, boss={"tenant": "o", "role": "operator"})
    async with running_gateway([system.server.address], gate=Gate(KeyFile(path))) as served:
        page = await opened(served.url, may_fail=True)

        async def give(key: str) -> None:
            await page.fill("#key", key)
            await page.keyboard.press("Enter")

        await expect(page.locator("#key-why")).to_contain_text("got none")
        await give(new_key())
        await expect(page.locator("#key-why")).to_contain_text("does not know the API key")
        await give(keys["alice"])
        await expect(page.locator("#banner")).to_contain_text("operator's API key")
        await ask(page, "Tell me of the sea.", tokens=8)
        await page.click("#key-button")
        await give(keys["boss"])
        await expect(page.locator("#banner")).to_be_hidden()
        await expect(page.locator("#model")).to_have_text("target")
        kept = "[localStorage.length, document.cookie, location.href.includes(sessionStorage[0])]"
        assert await page.evaluate(kept) == [0, "", False]


async def test_a_lost_drafter_is_shown_while_the_text_goes_on(
    opened: Opened, checkpoints: Checkpoints
) -> None:
    async with (
        running_system(checkpoints, drafters={"d0": checkpoints.drafter}) as system,
        running_gateway([system.server.address]) as served,
    ):
        page = await opened(served.url)
        await ask(page, "Tell me of the sea.")
        await system.drafters["d0"].stop()
        await expect(page.locator("#cluster-note")).to_contain_text("d0 lost")
        await ask(page, "And now?")
        await page.close()  # A page that stays asks a gateway that has gone.


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_axe_finds_nothing_and_phones_need_not_scroll_sideways(
    opened: Opened, served: Served, scheme: str
) -> None:
    for size in ({"width": 1440, "height": 900}, PHONE):
        page = await opened(served.url, viewport=size, color_scheme=scheme)
        await ask(page, "Tell me of the sea.", tokens=8)
        for tab in ("#tab-chat", "#tab-race"):
            await page.click(tab)
            found = await Axe().run(page)
            assert found.violations_count == 0, found.generate_report()
        wide = "document.documentElement.scrollWidth - window.innerWidth"
        assert await page.evaluate(wide) <= 0
