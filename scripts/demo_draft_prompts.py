"""Writes the prompts of `demo-draft`: `python scripts/demo_draft_prompts.py OUT.npz`.

None of them is from a benchmark. They are questions made from the templates below, beginnings of
questions that the target finishes itself, and texts that this Python and installed packages ship:
docstrings of the standard library and of packages under BSD, MIT, Apache or PSF licenses, their
descriptions, and German messages of Debian's packages. Those texts are read, not kept.
"""

from __future__ import annotations

import ast
import gettext
import random
import re
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from workers.models.catalog import default_home, resolve_model

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
HEAD = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"
TAIL = "<|im_end|>\n<|im_start|>assistant\n"
MOST_TOKENS = 700
LICENSES = re.compile(r"BSD|MIT|Apache|PSF|Python Software", re.I)

SUBJECTS = """photosynthesis|the water cycle|gravity|black
holes|vaccines|DNA|evolution|earthquakes| volcanoes|the ozone layer|climate change|solar
energy|nuclear fusion|magnetism|electric current|sound waves|the periodic table|acids and
bases|chemical bonds|atoms|the human heart|the immune system|sleep| memory|the
brain|antibiotics|bacteria|viruses|whales|bees|coral reefs|rain forests|deserts|glaciers| the
Moon|Mars|comets|the Roman Empire|ancient Egypt|the Silk Road|the Renaissance|the printing
press|the Industrial Revolution|the French Revolution|the Cold War|the United
Nations|democracy|inflation|interest rates|supply and demand|taxes|insurance|the stock
market|marketing|leadership|teamwork|negotiation|time
management|meditation|nutrition|vitamins|exercise|yoga|marathon training|chess|football|the
Olympic Games|jazz|opera|painting|photography|architecture|poetry|Shakespeare|science
fiction|mythology| philosophy|ethics|logic|probability|statistics|prime
numbers|fractions|geometry|calculus|algorithms| recursion|sorting|databases|operating
systems|computer networks|encryption|passwords|cloud computing| machine learning|neural
networks|robots|self-driving cars|electric cars|bicycles|trains|airplanes|
bridges|recycling|plastic waste|gardening|compost|cooking pasta|baking bread|coffee|tea|chocolate|
cheese|dogs|cats|horses|birds|travel on a budget|learning a language|public speaking|job
interviews| writing a resume|remote work|social media|online privacy|renewable energy|water
pollution|space travel| the Internet|3D printing|virtual reality|mental
health|stress|friendship|parenting|kindness|courage"""
PLACES = """
Japan|Italy|Brazil|Kenya|Norway|Peru|India|Canada|Egypt|Greece|Iceland|Mexico|Paris|Rome|
London|New York|Tokyo|Berlin|Cairo|Sydney|Cape Town|Istanbul|Lisbon|Vienna|Seoul|Bangkok"""
ROLES = """a teacher|a doctor|a detective|a pirate|a chef|a historian|a lawyer|a farmer|an
astronaut|a wizard|a travel guide|a poet|a scientist|a software engineer|a coach|a grandmother|a
journalist"""
NAMES = """
Maria|Tom|Anna|Ben|Lucy|Omar|Nina|Paul|Sara|Leo|Emma|Jack|Mia|Noah|Ella|Sam|Ruth|Carl|Lena|
Hugo|Tina|Mark|Rosa|Alex|Julia|Peter|Kate|David|Amy|John"""
THINGS = """
apples|oranges|books|pencils|marbles|stickers|cookies|eggs|flowers|tickets|shirts|cards|
coins|toys|bottles|candles|cupcakes|chairs|boxes|stamps|balloons|bags of rice|pizzas|shells"""
ASKS = """Write a story about {s}.|Write a short poem about {s}.|Explain {s} to a child.|Explain
{s} in simple terms.|What is {s}?|What are the main causes of {s}?|Give me five facts about
{s}.|List ten tips about {s}.|Write an essay about {s} with an introduction and a
conclusion.|Write an email to {n} about {s}.|Write a blog post about {s} for beginners.|What are
the advantages and disadvantages of {s}?|How does {s} affect our daily lives?|Describe the history
of {s}.|Compare {s} and {t}.|How are {s} and {t} related?|Pretend you are {r} and talk about
{s}.|You are {r}. {n} asks you about {s}. What do you say?| Plan a trip of {k} days to
{p}.|Describe the culture of {p}.|What is the capital of {p}, and what is it known for?|Write a
dialogue between {r} and {r2} about {s}.|Write a product description for a book about {s}.|Make a
quiz of {k} questions about {s}, with answers.|Write a speech about {s} for a school.|Outline a
presentation about {s}.|Who first discovered or studied {s}?|When did people begin to care about
{s}?|Why is {s} important?|Is {s} good or bad? Give arguments for both sides.|Write a Python
function that counts how often each word about {s} occurs in a text.|Write a program that prints
the first {k} numbers of a sequence and explain it.|Write a headline and a short news article
about {s} in {p}.|Suggest a recipe from {p} with a list of ingredients.|Give a step by step guide
to {s}.|Rewrite this sentence in a formal style: {n} thinks that {s} is a big deal.|Correct the
grammar: {n} don't knows much about {s}.|Classify the sentiment of this review: "The talk about
{s} was too long, but {n} liked it."|Extract all names and places from this text: "{n} and {m} met
in {p} to discuss {s}."|Make a table of {k} things about {s}.|what is {s} used for|who invented
{s}|where does {s} come from|how do i learn about {s}"""
SUMS = """{n} has {a} {x}. {m} gives {n} {b} more. Then {n} loses {c}. How many {x} does {n} have
now?| {n} buys {a} {x} for ${b} each and pays with a ${d} bill. How much change does {n} get?|A
shop sells {x} in packs of {b}. {n} needs {a} packs for a party and already has {c} {x}. How many
{x} are there in total?|{n} earns ${b} an hour and works {c} hours a day for {a} days. How much
money does {n} make?|{n} reads {b} pages a day. The book has {d} pages. After {a} days, how many
pages are left?|There are {d} {x}. {n} takes {b}% of them, and {m} takes half of the rest. How
many {x} remain?|{n} is {a} years older than {m}. In {c} years, {m} will be {d}. How old is {n}
now?|A train travels {d} miles in {c} hours. At the same speed, how far does it travel in {a}
hours?|{n} has {c} times as many {x} as {m}. Together they have {d}. How many {x} does each of
them have?|{n} saves ${a} each week and {m} saves ${b} each week. After {c} weeks, how much more
has the one saved than the other?|A garden has {a} rows of {b} plants. {c} plants die, and {n}
sells the rest for ${b} each. How much money does {n} get?|Each of {a} children eats {c} {x} a
day. How many {x} do they eat in {b} days, and what do they cost at ${c} each?|{n} runs {c} miles
on Monday, twice as many on Tuesday, and {a} more on Wednesday than on Tuesday. How many miles
does {n} run in total?|{n} bakes {d} {x}, keeps {a} and puts the others in boxes of {b}. How many
full boxes are there?|A tank holds {d} liters. It loses {c} liters an hour, and {n} adds {a}
liters every {b} hours. How much is in it after a day?"""
BEGUN = """|||||||||Write|Write a|How|How many|What|What is|Why|Who|When|Can
you|Explain|Create|Design| Give|Describe|Imagine|You are|If|I have|I
need|Please|Translate|Summarize|Solve|A|The|In|There are|
Compare|Rewrite|Suggest|Implement|def|Compose|Which|Is it|Find|Calculate|Given|Act as|Let's|Tell
me| Based on|Read|Identify|Develop|{n}|{n} has|{n} and {m}|Each|Every|At"""
PASSAGES = """Summarize: {0}|Summarize the following text in {k} sentences: {0}|{0}\n\nWhat is
this text about?|Answer the question with the help of this text.\n\n{0}\n\nQuestion: What should a
reader remember?|Read the passage and list its main points.\n\n{0}|{0}\n\nSummary:|Extract the
names and important terms from the text below.\n\n{0}|Here are two documents.\n\n1. {0}\n\n2.
{1}\n\nWhat do they have in common?|Write three questions that this text answers:\n\n{0}|Rewrite
the text for a child: {0}"""


def _choices(text: str) -> list[str]:
    """The parts of a text between bars; its line breaks are spaces, "\\n" stands for one."""
    return [one.strip().replace("\\n", "\n") for one in text.replace("\n", " ").split("|")]


def _filled(template: str, draw: random.Random) -> str:
    lists = {"s": SUBJECTS, "t": SUBJECTS, "p": PLACES, "r": ROLES, "r2": ROLES, "x": THINGS}
    lists |= {"n": NAMES, "m": NAMES}
    found = {name: draw.choice(_choices(one)) for name, one in lists.items()}
    ranges = {"a": (2, 20), "b": (2, 15), "c": (2, 9), "d": (20, 400), "k": (3, 10)}
    numbers = {name: draw.randint(*ends) for name, ends in ranges.items()}
    return template.format(**found, **numbers)


def _packages() -> Iterator[metadata.Distribution]:
    for one in metadata.distributions():
        about = " ".join(one.metadata.get_all("Classifier") or []) + str(
            one.metadata.get("License-Expression") or one.metadata.get("License") or ""
        )
        if LICENSES.search(about[:4000]) and "GPL" not in about:
            yield one


def _sources(draw: random.Random, count: int) -> Iterator[str]:
    """Python files of the standard library and of packages, in a random order."""
    paths = [str(path) for path in Path(ast.__file__).parent.glob("*.py")]
    for one in _packages():
        if one.metadata["Name"].startswith("paceline"):
            continue
        paths += [str(one.locate_file(f)) for f in one.files or [] if str(f).endswith(".py")]
    paths = sorted({path for path in paths if "/test" not in path})
    for path in draw.sample(paths, min(count, len(paths))):
        try:
            yield Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue


def _code_prompts(draw: random.Random, count: int) -> Iterator[str]:
    """Functions with a docstring, up to its end: what follows is the body."""
    for source in _sources(draw, count):
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):
            continue
        lines, taken = source.splitlines(), 0
        imports = [
            lines[node.lineno - 1]
            for node in tree.body
            if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or not ast.get_docstring(node) or taken >= 6:
                continue
            end = node.body[0].end_lineno or 0
            own = lines[node.lineno - 1 : end]
            indent = len(own[0]) - len(own[0].lstrip())
            text = "\n".join(line[indent:] for line in own)
            if 80 < len(text) < 1500:
                taken += 1
                head = "\n".join(imports[:2]) + "\n\n\n" if draw.random() < 0.5 else "\n\n"
                yield head + text + "\n"


def _passages() -> list[str]:
    """Paragraphs of descriptions of packages, and of docstrings of modules."""
    texts = [str(one.metadata.get_payload() or "") for one in _packages()]
    for source in _sources(random.Random(1), 3000):
        try:
            texts.append(ast.get_docstring(ast.parse(source)) or "")
        except (SyntaxError, ValueError):
            continue
    found: set[str] = set()
    for text in texts:
        plain = re.sub(r"[ \t]+", " ", re.sub(r"<[^>]+>|\[!\[.*?\)|https?://\S+", "", text))
        blocks = [one.strip() for one in plain.split("\n\n") if one.count(".") and len(one) > 120]
        for start in range(0, len(blocks), 3):
            found.add("\n\n".join(blocks[start : start + 3])[:1600])
    return sorted(found)


def _german() -> list[str]:
    found: set[str] = set()
    for path in Path("/usr/share/locale/de/LC_MESSAGES").glob("*.mo"):
        try:
            with path.open("rb") as stream:
                catalog = gettext.GNUTranslations(stream)._catalog  # type: ignore[attr-defined]
        except UnicodeDecodeError:
            continue
        found |= {one for one in catalog.values() if isinstance(one, str) and "%" not in one}
    return sorted(
        one for one in found if 40 < len(one) < 300 and "\n" not in one and "  " not in one
    )


def prompts(draw: random.Random) -> Iterator[tuple[str, bool]]:
    """Prompts, and whether each is only the beginning of a question."""
    yield TAIL, False  # closes a question that the target asked itself

    def chat(question: str) -> tuple[str, bool]:
        return HEAD + question + TAIL, False

    for _ in range(9000):
        yield HEAD + _filled(draw.choice(_choices(BEGUN)), draw), True
    for _ in range(4500):
        yield chat(_filled(draw.choice(_choices(ASKS)), draw))
    for _ in range(4500):
        sums = [_filled(draw.choice(_choices(SUMS)), draw)]
        yield chat(sums[0])
    code = list(_code_prompts(draw, 4000))
    draw.shuffle(code)
    for one in code[:5500]:
        yield one, False
    passages, german = _passages(), _german()
    for _ in range(2500):
        template = draw.choice(_choices(PASSAGES)).replace("{k}", str(draw.randint(2, 5)))
        first, second = draw.choice(passages), draw.choice(passages)
        if "{1}" in template:
            first, second = first[:800], second[:800]
        yield chat(template.replace("{0}", first).replace("{1}", second))
    for one in draw.sample(passages, min(1200, len(passages))):
        yield one[: draw.randint(60, 800)], False
    for one in draw.sample(german, min(1200, len(german))):
        yield chat(f"Translate German to English: {one}")


def main(out: Path, tokens_of: Callable[[str], list[int]], seed: int = 0) -> None:
    """Write the prompts as tokens."""
    found = [(tokens_of(text)[:MOST_TOKENS], asks) for text, asks in prompts(random.Random(seed))]
    np.savez_compressed(
        out,
        token_ids=np.concatenate([one for one, _ in found]).astype(np.uint16),
        lengths=np.array([len(one) for one, _ in found], np.int32),
        asks=np.array([asks for _, asks in found]),
    )
    print(f"{len(found)} prompts, {sum(len(one) for one, _ in found)} tokens")


if __name__ == "__main__":
    import os

    folder = resolve_model("demo", home=default_home(os.environ)).folder
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    main(Path(sys.argv[1]), lambda text: tokenizer.encode(text, add_special_tokens=False).ids)
