"""The real webdataset on both sides: its shards are read here, our samples run in its pipelines."""

import gc
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import webdataset as wds

from omniload.errors import ConfigError, SampleError, ShardError
from omniload.images import InternVLTiles
from omniload.interop import (
    SampleMaker,
    as_is,
    open_webdataset,
    pack_stage,
    records_stage,
    to_webdataset,
)
from omniload.shards import open_shards
from omniload.stream import StreamLoader, StreamPart
from omniload.tars import open_tars
from omniload.tools.index_run import index_tars
from omniload.tools.preprocess_run import preprocess_data
from omniload.tools.recipe import RunOptions, make_encoder
from omniload.transforms import transform_from_settings
from omniload.types import Budget
from omniload.world import World
from tests.data_makers import image_bytes, turns
from tests.tar_makers import RECIPE, header_of, overwrite, picture, tar_members

BUDGET = Budget(tokens=1000, tiles=24)
ROOT = Path(__file__).resolve().parent.parent

# webdataset 1.0.2 leaves the files of its shards to the garbage collection
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(autouse=True)
def _collected():
    yield
    gc.collect()


def a_maker():
    return SampleMaker(
        encoder=make_encoder(RECIPE), policy=InternVLTiles(size=28, max_tiles=4, thumbnail=True)
    )


def wds_shards(folder, count=24, maxcount=8, **options):
    """Shards as webdataset writes them; returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    with wds.ShardWriter(f"{folder}/%06d.tar", maxcount=maxcount, verbose=0, **options) as sink:
        for i in range(count):
            sample = {"__key__": f"{i:06d}"}
            if i % 3:
                sample["jpg"] = picture(i)
                talk = turns("<image>\nWhat?", f"Picture {i}")
            else:
                talk = turns(f"And {i}?", "A number.")
            sample["json"] = {"conversations": talk}
            sink.write(sample)
    return sorted(str(path) for path in folder.glob("*.tar"))


def test_shards_of_webdataset_are_indexed_and_preprocessed(tmp_path):
    wds_shards(tmp_path / "w")
    summary = index_tars([tmp_path / "w"], recipe=RECIPE)
    assert summary.manifest.num_rows == 24
    assert summary.manifest.counts["damaged"] == 0
    preprocess_data(tmp_path / "w", tmp_path / "s", recipe=RECIPE,
                    options=RunOptions(keep_order=True))  # fmt: skip
    tars, shards = open_tars(tmp_path / "w"), open_shards(tmp_path / "s")
    for row in range(24):
        one, two = tars.read(row), shards.read(row)
        assert (one.key, one.images) == (two.key, two.images)
        np.testing.assert_array_equal(one.input_ids, two.input_ids)


def test_shards_with_names_that_need_records_in_front_are_read(tmp_path):
    with wds.TarWriter(str(tmp_path / "a.tar")) as sink:
        for i in range(4):
            key = "folder/" * 40 + f"schlüssel-{i}"
            sink.write({"__key__": key, "jpg": image_bytes(i), "txt": "Caption"})
    assert index_tars([tmp_path], recipe=RECIPE).manifest.num_rows == 4
    assert open_tars(tmp_path).read(3).key.endswith("/schlüssel-3")


def test_a_writer_that_was_killed_leaves_samples_and_a_word_about_the_end(tmp_path):
    paths = wds_shards(tmp_path)
    path = Path(paths[0])
    path.write_bytes(path.read_bytes().rstrip(b"\0"))
    data = path.read_bytes()
    path.write_bytes(data + bytes(-len(data) % 512))
    summary = index_tars([tmp_path], recipe=RECIPE)
    assert summary.manifest.num_rows == 24
    assert summary.manifest.counts["damaged"] == 1
    assert summary.reasons == {"damaged tar": 1}


def test_webdataset_drops_what_follows_a_damaged_header_and_the_index_does_not(tmp_path):
    paths = wds_shards(tmp_path, count=40, maxcount=100)
    overwrite(Path(paths[0]), header_of(paths[0], "000010.json"), b"\xff" * 100)
    theirs = list(wds.WebDataset(paths, shardshuffle=False))
    assert len(theirs) < 12
    assert index_tars([tmp_path], recipe=RECIPE).manifest.num_rows == 39


# --- ours as theirs ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tars(tmp_path_factory):
    from tests.data_makers import write_tar

    folder = tmp_path_factory.mktemp("tars")
    write_tar(folder / "a.tar", tar_members(16))
    index_tars([folder], recipe=RECIPE)
    return open_tars(folder)


def test_our_samples_run_in_a_pipeline_of_webdataset(tars):
    samples = to_webdataset(tars)
    assert len(samples) == 16
    pipeline = wds.DataPipeline(samples, wds.shuffle(8), wds.decode("pil"))
    for _ in range(2):
        found = {sample["__key__"]: sample for sample in pipeline}
        assert sorted(found) == [f"{row:09d}" for row in range(16)]
    one = found["000000000"]
    assert one["jpg"].size == tuple(tars.read(0).image_sizes[0])
    assert one["json"]["messages"][0] == {"role": "user", "content": "<image>\nWhat?"}
    assert one["__url__"] == "a.tar"
    assert {"0.jpg", "1.jpg", "json"} <= set(found["000000001"])


def test_a_round_trip_through_a_shard_of_webdataset_changes_nothing(tars, tmp_path):
    with wds.TarWriter(str(tmp_path / "a.tar")) as sink:
        for sample in to_webdataset(tars):
            sink.write(sample)
    index_tars([tmp_path], recipe=RECIPE)
    back = open_tars(tmp_path)
    assert len(back) == len(tars)
    for row in range(len(tars)):
        one, two = tars.read(row), back.read(row)
        assert (one.key, one.images, one.messages) == (two.key, two.images, two.messages)
        np.testing.assert_array_equal(one.input_ids, two.input_ids)
        np.testing.assert_array_equal(one.labels, two.labels)


def test_rows_can_be_chosen(tars):
    assert [s["__key__"] for s in to_webdataset(tars, rows=[5, 3])] == ["000000005", "000000003"]


def test_shards_without_conversations_say_so(tmp_path):
    wds_shards(tmp_path / "w", count=3)
    preprocess_data(
        tmp_path / "w", tmp_path / "s", recipe=RECIPE, options=RunOptions(drop_text=True)
    )
    with pytest.raises(ConfigError, match="without --drop-text"):
        next(iter(to_webdataset(open_shards(tmp_path / "s"))))


# --- theirs as ours ----------------------------------------------------------------------------


def ids(batches):
    return sorted(number for batch in batches for number in batch.sample_ids.tolist())


def test_a_pipeline_of_webdataset_packs_with_our_stage(tmp_path):
    paths = wds_shards(tmp_path)
    stage = pack_stage(budget=BUDGET, maker=a_maker(), buffer=8)
    pipeline = wds.WebDataset(paths, shardshuffle=False).shuffle(4).compose(stage)
    batches = list(pipeline)
    assert ids(batches) == list(range(24))
    for batch in batches:
        assert batch.num_tokens <= 1000
        assert batch.num_tiles <= 24
    maker = a_maker()
    transform = transform_from_settings(maker.settings())
    records = list(records_stage(maker)(wds.WebDataset(paths, shardshuffle=False)))
    total = sum(transform.lengths(record)[0] for record in records)
    assert sum(batch.num_tokens for batch in batches) == total


def test_its_loader_and_workers_run_our_stage(tmp_path):
    paths = wds_shards(tmp_path)
    stage = pack_stage(budget=BUDGET, maker=a_maker(), buffer=8)
    pipeline = wds.WebDataset(paths, shardshuffle=False).compose(stage)
    loader = wds.WebLoader(pipeline, batch_size=None, collate_fn=as_is, num_workers=2)
    found = ids(loader)
    assert len(found) == len(set(found)) == 24


@pytest.mark.parametrize("num_workers", [0, 2])
def test_its_shards_are_a_stream_of_ours(tmp_path, num_workers):
    wds_shards(tmp_path)
    maker = a_maker()
    stream = open_webdataset(f"{tmp_path}/{{000000..000002}}.tar", maker=maker)
    loader = StreamLoader(
        stream, budget=BUDGET, transform=transform_from_settings(maker.settings()),
        num_workers=num_workers, world=World(), buffer=8,
    )  # fmt: skip
    keys = list(loader)
    assert len(ids(keys)) == len(set(ids(keys))) == 24


@pytest.mark.parametrize("url", ["pipe:echo pwned >&2", " PIPE:cat x", "{pipe:a,pipe:b}"])
def test_commands_in_urls_are_refused_unless_allowed(tmp_path, url):
    path = wds_shards(tmp_path, count=4)[0]
    with pytest.raises(ConfigError, match=r"not a command that is run: got .*allow_pipe=True"):
        open_webdataset([path, url], maker=a_maker())
    stream = open_webdataset(f"pipe:cat {path}", maker=a_maker(), allow_pipe=True)
    loader = StreamLoader(
        stream, budget=BUDGET, transform=transform_from_settings(a_maker().settings()),
        world=World(),
    )  # fmt: skip
    assert len(ids(loader)) == 4


def test_paths_patterns_and_other_makers_are_refused_at_once(tars):
    with pytest.raises(ConfigError, match=r"open_shards\(folder\).*got str"):
        to_webdataset("shards/")
    with pytest.raises(ConfigError, match=r"Expand a pattern with glob.glob"):
        open_webdataset("train-*.tar", maker=a_maker())
    with pytest.raises(ConfigError, match=r"SampleMaker, got NoneType"):
        open_webdataset("a.tar", maker=None)


def test_a_shard_that_can_t_be_read_is_an_error_of_ours(tmp_path):
    path = Path(wds_shards(tmp_path, count=4)[0])
    with pytest.raises(ShardError, match=r"got '.*000001.tar', which is not there .* by braces"):
        open_webdataset(f"{tmp_path}/00000{{0..1}}.tar", maker=a_maker())
    with pytest.raises(ShardError, match="which is a folder"):
        open_webdataset(str(tmp_path), maker=a_maker())
    opened = open_webdataset(str(path), maker=a_maker())
    for content in (None, b"no tar"):
        path.unlink() if content is None else path.write_bytes(content)
        with pytest.raises(ShardError, match=rf"webdataset can read, .*Error: .*{path.name}"):
            list(opened(StreamPart()))


def test_what_is_no_sample_is_refused_or_passed_over(tmp_path):
    with wds.TarWriter(str(tmp_path / "a.tar")) as sink:
        sink.write({"__key__": "1", "jpg": image_bytes(), "txt": "One"})
        sink.write({"__key__": "2", "jpg": b"no image", "txt": "Two"})
        sink.write({"__key__": "3", "jpg": image_bytes(), "json": {"nothing": 1}})
    samples = wds.WebDataset(str(tmp_path / "a.tar"), shardshuffle=False)
    with pytest.raises(SampleError, match=r"image 1 of 1.*key='2', shard=.*a.tar"):
        list(records_stage(a_maker())(samples))
    assert [r.key for r in records_stage(a_maker(), on_bad_sample="skip")(samples)] == ["1"]
    with pytest.raises(ConfigError, match=r"before .decode\(\), as bytes: 'jpg'"):
        list(records_stage(a_maker())(samples.decode("pil")))
    with pytest.raises(ConfigError, match="must be a dict with '__key__', got int"):
        list(records_stage(a_maker())([3]))
    with pytest.raises(ConfigError, match="on_bad_sample must be"):
        records_stage(a_maker(), on_bad_sample="x")
    with pytest.raises(ConfigError, match="at least one shard"):
        open_webdataset([], maker=a_maker())


def test_the_programs_of_the_docs_run_as_they_stand(tmp_path):
    text = (ROOT / "docs" / "running.md").read_text(encoding="utf-8")
    streams = text[text.index("**Streams.**") : text.index("## Shards in a bucket")]
    programs = re.findall(r"```python\n(.*?)```", streams, re.DOTALL)
    for i, path in enumerate(wds_shards(tmp_path)):
        Path(path).rename(tmp_path / f"train-{i:06d}.tar")
    lines = [{"id": f"{i}", "messages": [{"role": "user", "content": "And?"},
                                         {"role": "assistant", "content": f"{i}"}]}
             for i in range(10)]  # fmt: skip
    (tmp_path / "talks.jsonl").write_text("\n".join(map(json.dumps, lines)))
    said = []
    for name, program in zip(("talks.py", "shards.py"), programs, strict=True):
        (tmp_path / name).write_text(program)
        done = subprocess.run(
            [sys.executable, name], cwd=tmp_path, capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.splitlines())
    assert "samples=10, fillers=0" in said[0][-1]
    assert (said[1][0].split()[0], said[1][-1]) == ("24", "24")


def test_importing_the_package_does_not_import_webdataset():
    code = "import sys, omniload.interop; print('webdataset' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
