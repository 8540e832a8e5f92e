"""`omniload bench index`: what it costs to index tars, a member and a byte."""

from __future__ import annotations

import io
import json
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["index", "write_tar"]


def index(
    samples: Annotated[int, typer.Option(min=1, help="Samples of the tar: an image, a text.")] = (
        2000
    ),
    image_bytes: Annotated[int, typer.Option(min=1024, help="Bytes of an image.")] = 28_000,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds of timing.")] = 7,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure the parts of indexing a tar that lies in the page cache, one thread, CPU time.

    "places and checksums" is all that `omniload index` does but measuring lengths; "checksums
    alone" is xxh3 over the same bytes in memory. The target is 25 us a member for the difference.

    Example: `omniload bench index --samples 4000`
    """
    from omniload.tools.bench_common import emit, measure

    with tempfile.TemporaryDirectory(prefix="omniload-bench-") as folder:
        path = Path(folder) / "a.tar"
        write_tar(path, samples, image_bytes)
        ways = _ways(path)
        timings = measure(ways, repeats=repeats, clock=time.process_time)
        size = path.stat().st_size
    members = 2 * samples
    rows: list[dict[str, Any]] = [
        {
            "way": name,
            "us a member": timing.median_s / members * 1e6,
            "min us": timing.min_s / members * 1e6,
            "GB/s": size / timing.median_s / 1e9,
        }
        for name, timing in timings.items()
    ]
    own = {row["way"]: row for row in rows}
    rows.append(
        {
            "way": "places: the difference",
            "us a member": own["places and checksums"]["us a member"]
            - own["checksums alone"]["us a member"],
            "min us": own["places and checksums"]["min us"] - own["checksums alone"]["min us"],
            "GB/s": "-",
        }
    )
    notes = (
        f"{members:,} members, {size / 1e6:,.0f} MB, warm page cache; CPU time, median of "
        f"{repeats} rounds. Reading the bytes counts with the places. lengths: tokenised with the "
        "byte-level tokenizer, images measured by their headers."
    )
    emit("index", rows, as_json, notes)


def write_tar(path: Path, samples: int, image_bytes: int) -> None:
    """Write a tar of samples with one image and a conversation of some 300 characters."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    small = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (48, 64, 3), np.uint8)).save(small, "JPEG", quality=50)
    image = small.getvalue() + rng.bytes(max(image_bytes - len(small.getvalue()), 0))
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for number in range(samples):
            talk = [
                {"from": "human", "value": "<image>\nWhat is shown here? " + "Look. " * 10},
                {"from": "gpt", "value": f"Picture {number}. " + "It shows a thing. " * 10},
            ]
            text = json.dumps({"conversations": talk}).encode()
            for name, content in (("jpg", image), ("json", text)):
                info = tarfile.TarInfo(f"part/{number:08d}.{name}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))


def _ways(path: Path) -> dict[str, Callable[[], object]]:
    from omniload.tars.maker import SampleMaker
    from omniload.tars.scan import index_tar
    from omniload.tools.recipe import Recipe, make_encoder

    recipe = Recipe()
    maker = SampleMaker(encoder=make_encoder(recipe), policy=recipe.policy())
    side = path.with_name("side")
    contents = list(_contents(path))
    return {
        "tarfile, headers": partial(_by_tarfile, path),
        "headers": partial(_scan, path, with_checksums=False),
        "places and checksums": partial(_places, path, side),
        "checksums alone": partial(_checksums, contents),
        "all, with lengths": partial(index_tar, path, side, maker=maker, source="bench"),
    }


def _by_tarfile(path: Path) -> int:
    with tarfile.open(path) as tar:
        return sum(1 for _ in tar)


def _scan(path: Path, *, with_checksums: bool) -> int:
    from omniload.tars.archive import Archive
    from omniload.tars.scan import scan_members

    with Archive(path) as archive:
        return sum(1 for _ in scan_members(archive, with_checksums=with_checksums))


def _places(path: Path, side: Path) -> None:
    from omniload.shards.manifest import write_atomic
    from omniload.tars.archive import Archive
    from omniload.tars.facts import TarFacts
    from omniload.tars.members import Damage
    from omniload.tars.samples import split_name
    from omniload.tars.scan import scan_members
    from omniload.tars.side_file import TableWriter

    table = TableWriter()
    with Archive(path) as archive:
        members = samples = 0
        for found in scan_members(archive):
            if isinstance(found, Damage):
                continue
            group, checksums = found
            table.add(group, checksums, key=split_name(group[0].name)[0])
            members, samples = members + len(group), samples + 1
        facts = TarFacts(
            num_bytes=archive.size,
            changed_ns=archive.changed_ns,
            xxh3_128=archive.whole_digest(),
            source="bench",
            settings_fingerprint="",
            num_members=members,
            num_samples=samples,
            num_rows=0,
            bytes_skipped=0,
            damage=(),
            num_damaged=0,
        )
    write_atomic(side, table.finish(facts)[1])


def _contents(path: Path) -> Iterator[bytes]:
    from omniload.tars.archive import Archive
    from omniload.tars.members import Member

    with Archive(path) as archive:
        found = [member for member in archive.members() if isinstance(member, Member)]
        yield from (archive.content(member) for member in found)


def _checksums(contents: list[bytes]) -> int:
    from omniload.tars.archive import digest

    total: Any = 0
    for content in contents:
        total ^= digest(content)
    return int(total)
