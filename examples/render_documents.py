"""Render a small data set of document-like images with questions and answers, as LLaVA JSON.

    python examples/render_documents.py OUT --samples 400

Sizes differ as they do in real data: receipts are tall, tables wide, charts in between, and answers
run from one number to a full transcript. Some samples have several images, some none.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

GOODS = ["tea", "rice", "paper", "lamp", "rope", "soap", "bread", "chair", "salt", "glass"]
TOWNS = ["Lund", "Pisa", "Kobe", "Bonn", "Cork", "Oslo", "Lima", "Graz"]


def draw_text(lines: list[str], *, width: int, scale: int) -> Image.Image:
    """Draw lines of text, then enlarge them: works with any font that PIL was built with."""
    font = ImageFont.load_default()
    page = Image.new("RGB", (width, 14 * len(lines) + 12), "white")
    pen = ImageDraw.Draw(page)
    for number, line in enumerate(lines):
        pen.text((6, 6 + 14 * number), line, fill=(20, 20, 40), font=font)
    return page.resize((page.width * scale, page.height * scale), Image.Resampling.BICUBIC)


def receipt(rng: random.Random) -> tuple[Image.Image, list[tuple[str, str]]]:
    items = [(rng.choice(GOODS), rng.randint(1, 99)) for _ in range(rng.randint(3, 28))]
    total = sum(price for _, price in items)
    lines = [f"{rng.choice(TOWNS)} market", "", *(f"{name:<10}{price:>5}" for name, price in items)]
    image = draw_text([*lines, "", f"total {total}"], width=130, scale=rng.choice([1, 2, 3]))
    transcript = "\n".join(f"{name} {price}" for name, price in items)
    return image, [
        ("What is the total?", str(total)),
        ("How many items are listed?", str(len(items))),
        ("Write down every item with its price.", transcript),
    ]


def table(rng: random.Random) -> tuple[Image.Image, list[tuple[str, str]]]:
    rows, columns = rng.randint(2, 8), rng.randint(4, 9)
    cells = [[rng.randint(0, 999) for _ in range(columns)] for _ in range(rows)]
    lines = ["".join(f"{cell:>8}" for cell in row) for row in cells]
    image = draw_text(lines, width=60 * columns, scale=rng.choice([1, 2]))
    row, column = rng.randrange(rows), rng.randrange(columns)
    return image, [
        (
            f"What stands in row {row + 1}, column {column + 1}?",
            str(cells[row][column]),
        ),
        ("Copy the table.", "\n".join(" ".join(map(str, line)) for line in cells)),
    ]


def chart(rng: random.Random) -> tuple[Image.Image, list[tuple[str, str]]]:
    towns = rng.sample(TOWNS, rng.randint(2, 6))
    values = [rng.randint(5, 100) for _ in towns]
    width, height = rng.choice([(320, 240), (480, 480), (640, 360), (960, 640)])
    image = Image.new("RGB", (width, height), (250, 250, 245))
    pen = ImageDraw.Draw(image)
    step = width / len(towns)
    for place, (town, value) in enumerate(zip(towns, values, strict=True)):
        left = place * step + 0.2 * step
        top = height - 20 - (height - 40) * value / 100
        shade = tuple(rng.randint(40, 200) for _ in range(3))
        pen.rectangle((left, top, left + 0.6 * step, height - 20), fill=shade)
        pen.text((left, height - 16), town, fill="black")
    best = towns[values.index(max(values))]
    return image, [("Which town has the tallest bar?", best)]


def text_only(rng: random.Random) -> list[tuple[str, str]]:
    first, second = rng.randint(1, 500), rng.randint(1, 500)
    if rng.random() < 0.5:
        return [(f"What is {first} plus {second}?", str(first + second))]
    story = " ".join(f"{rng.choice(TOWNS)} sells {rng.choice(GOODS)}." for _ in range(first % 60))
    return [(f"Repeat: {story or 'nothing'}", story or "nothing")]


def render(folder: Path, *, num_samples: int, seed: int) -> Path:
    """Write `folder/images/*.jpg` and `folder/annotations.json`; return the latter."""
    rng = random.Random(seed)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    annotations = []
    for number in range(num_samples):
        kind = rng.choices(["one", "several", "none"], weights=[78, 12, 10])[0]
        pages = [
            rng.choices([receipt, table, chart], weights=[3, 3, 4])[0](rng)
            for _ in range({"one": 1, "several": rng.randint(2, 3), "none": 0}[kind])
        ]
        names = []
        for place, (image, _) in enumerate(pages):
            names.append(f"images/{number:05d}-{place}.jpg")
            image.save(folder / names[-1], quality=85)
        if not pages:
            turns = text_only(rng)
        elif len(pages) == 1:
            turns = rng.sample(pages[0][1], rng.randint(1, len(pages[0][1])))
        else:
            turns = [
                (f"Page {place + 1}: {question}", answer)
                for place, (_, questions) in enumerate(pages)
                for question, answer in questions[:1]
            ]
        conversation = []
        for place, (question, answer) in enumerate(turns):
            marks = "<image>\n" * len(pages) if place == 0 else ""
            conversation.append({"from": "human", "value": marks + question})
            conversation.append({"from": "gpt", "value": answer})
        sample: dict[str, object] = {"id": f"doc-{number:05d}", "conversations": conversation}
        if names:
            sample["image"] = names[0] if len(names) == 1 else names
        annotations.append(sample)
    path = folder / "annotations.json"
    path.write_text(json.dumps(annotations, indent=1), encoding="utf-8")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--samples", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(render(options.out, num_samples=options.samples, seed=options.seed))


if __name__ == "__main__":
    main()
