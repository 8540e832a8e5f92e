"""See omniload do its job: images to shards to training on two ranks, against torch's DataLoader.

    python examples/demo.py --out demo-out

Renders document-like images with questions and answers, turns them into shards, trains a tiny
vision-language model once with padded batches and once with packed ones, and prints what differs.
Takes a minute or two on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from render_documents import render
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
MARKER = ".omniload-demo"  # we only ever delete a folder that carries it


def run(console: Console, *command: str | Path) -> None:
    words = [str(word) for word in command]
    shown = " ".join(Path(word).name if word == sys.executable else word for word in words)
    console.print(f"$ {shown}", style="dim", highlight=False, soft_wrap=True)
    subprocess.run(words, check=True, env={"OMP_NUM_THREADS": "1", **os.environ})


def prepare_folder(out: Path) -> None:
    if out.exists():
        if not (out / MARKER).exists() and any(out.iterdir()):
            raise SystemExit(
                f"{out} is not a folder of this demo and not empty: give another --out"
            )
        shutil.rmtree(out)
    out.mkdir(parents=True)
    (out / MARKER).touch()


def show_table(console: Console, results: dict[str, dict]) -> None:
    table = Table(
        title="The same model and samples, 2 ranks; padded by torch, packed by omniload",
        title_justify="left",
    )
    table.add_column("")
    for name in results:
        table.add_column(name, justify="right")
    before, after = results.values()
    rows = [
        ("positions that are padding (pad ratio)", "pad_ratio", "{:.3f}"),
        ("waiting for the slower rank, tiles (dist ratio)", "dist_ratio_tiles", "{:.3f}"),
        ("waiting for the slower rank, tokens", "dist_ratio_tokens", "{:.3f}"),
        ("steps", "steps", "{}"),
        ("samples", "samples", "{}"),
        ("seconds", "seconds", "{:.1f}"),
        ("tokens/s without padding", "tokens_per_s", "{:,}"),
        ("loss at the end, all samples", "final_loss", "{:.3f}"),
    ]
    for label, key, pattern in rows:
        table.add_row(label, *(pattern.format(result[key]) for result in results.values()))
    console.print(table)
    console.print(f"tokens/s: {after['tokens_per_s'] / before['tokens_per_s']:.2f}x", style="bold")


def draw(results: dict[str, dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    keys = ["pad_ratio", "dist_ratio_tiles", "dist_ratio_tokens"]
    for place, (name, result) in enumerate(results.items()):
        places = [number + 0.4 * place for number in range(len(keys))]
        bars = left.bar(places, [result[key] for key in keys], width=0.38, label=name)
        left.bar_label(bars, fmt="%.3f", fontsize=8)
        samples, loss = result["curve"]["samples"], result["curve"]["loss"]
        window = max(1, len(loss) // 25)
        mean = [sum(loss[i : i + window]) / window for i in range(len(loss) - window + 1)]
        right.plot(samples[window - 1 :], mean, label=name)
    left.set_xticks([0.2, 1.2, 2.2], ["padding", "waiting, tiles", "waiting, tokens"])
    left.set_title("share that is wasted")
    right.set_title(f"training loss, mean of {window} steps")
    right.set_xlabel("samples")
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("demo-out"))
    parser.add_argument("--samples", type=int, default=400)
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    console = Console()

    console.rule("1. Raw data: images and questions", align="left")
    prepare_folder(options.out)
    annotations = render(options.out / "raw", num_samples=options.samples, seed=0)
    console.print(f"{options.samples} samples in {annotations}", highlight=False)

    console.rule("2. Preprocess to Arrow shards", align="left")
    shards = options.out / "shards"
    omniload = [sys.executable, "-m", "omniload"]
    tiling = ["--tile-size", "112", "--tokens-per-tile", "16", "--max-tokens", "1024"]
    run(console, *omniload, "preprocess", annotations, shards, *tiling, "--workers", "2")

    console.rule("3. Look at them", align="left")
    run(console, *omniload, "inspect", shards)

    results = {}
    for place, (loader, name) in enumerate([("torch", "torch"), ("omniload", "omniload")]):
        console.rule(f"{4 + place}. Train on 2 ranks with {name}'s DataLoader", align="left")
        path = options.out / f"{loader}.json"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        training = [HERE / "compare.py", shards, "--loader", loader, "--out", path]
        epochs = ["--epochs", str(options.epochs)]
        run(console, *torchrun, "--nproc-per-node", "2", *training, *epochs)
        results[name] = json.loads(path.read_text(encoding="utf-8"))

    console.rule("6. What differs", align="left")
    show_table(console, results)
    draw(results, options.out / "figures.png")
    console.print(f"figures: {options.out / 'figures.png'}", highlight=False)


if __name__ == "__main__":
    main()
