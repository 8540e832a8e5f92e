import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from omniload.errors import ConfigError, SampleError
from omniload.shards import open_shards
from omniload.tools.preprocess import parse_bytes
from omniload.tools.preprocess_run import preprocess_data
from omniload.tools.recipe import Recipe, RunOptions
from omniload.transforms import transform_from_settings
from tests.data_makers import (
    image_bytes,
    llava_set,
    turns,
    write_json,
    write_jsonl,
    write_parquet,
    write_tar,
)

SMALL = Recipe(tile_size=28, max_tiles=4, tokens_per_tile=4)


def run(src, out, *, recipe=SMALL, **settings):
    names = RunOptions.__dataclass_fields__
    options = RunOptions(**{k: settings.pop(k) for k in list(settings) if k in names})
    return preprocess_data(src, out, recipe=recipe, options=options, **settings)


def rows(folder):
    shards = open_shards(folder)
    return [shards.read(row) for row in range(len(shards))]


def rejected(folder):
    return [json.loads(line) for line in (folder / "rejected.jsonl").read_text().splitlines()]


def content(folder):
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


# --- the whole line --------------------------------------------------------------------------


def test_every_record_becomes_one_row_that_the_default_transform_takes(tmp_path):
    src = llava_set(tmp_path / "raw", 90)
    summary = run(src, tmp_path / "out")
    shards = open_shards(tmp_path / "out")
    found = rows(tmp_path / "out")
    assert sorted(r.key for r in found) == sorted(f"sample-{i}" for i in range(90))
    transform = transform_from_settings(shards.manifest.settings)
    rng = np.random.default_rng(0)
    for record in found:
        sample = transform(record, rng)
        planned = (shards.index.num_tokens[record.row], shards.index.num_tiles[record.row])
        assert (sample.num_tokens, sample.num_tiles) == planned
        assert sample.num_loss_tokens == shards.index.num_loss_tokens[record.row] > 0
    facts = summary.as_dict()
    assert (facts["read"], facts["written"], facts["rejected"]) == (90, 90, 0)
    assert facts["tokens"] == int(shards.index.num_tokens.sum())
    assert facts["tiles"] == int(shards.index.num_tiles.sum())
    assert facts["sources"] == {"llava_instruct": 90}
    names = {path.name for path in (tmp_path / "out").iterdir()}
    expected = {"manifest.json", "index.arrow", "tokenizer.json", "rejected.jsonl", ".run.json"}
    assert names == expected | {shard.name for shard in shards.manifest.shards}


def test_the_stored_tokenizer_gives_the_stored_ids(tmp_path):
    from tokenizers import Tokenizer

    run(llava_set(tmp_path / "raw", 1), tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    text = tokenizer.decode(rows(tmp_path / "out")[0].input_ids.tolist(), skip_special_tokens=False)
    assert "What is 0?" in text
    assert "A number." in text


@pytest.mark.parametrize("keep_order", [False, True])
def test_any_number_of_workers_gives_the_same_bytes(tmp_path, keep_order):
    src = llava_set(tmp_path / "raw", 270)
    for workers in (1, 2):
        run(src, tmp_path / f"{workers}", workers=workers, keep_order=keep_order)
    assert len(open_shards(tmp_path / "1").manifest.shards) >= 3
    assert content(tmp_path / "1") == content(tmp_path / "2")


def test_rows_are_shuffled_by_the_seed_and_sources_are_mixed_in_every_shard(tmp_path):
    (tmp_path / "raw").mkdir()
    for name in ("a", "b"):
        records = [{"id": f"{name}{i}", "conversations": turns("q", "r")} for i in range(512)]
        write_jsonl(tmp_path / "raw" / f"{name}.jsonl", records)
    for seed in (0, 1):
        run(tmp_path / "raw", tmp_path / f"{seed}", seed=seed)
    keys = [[r.key for r in rows(tmp_path / f"{seed}")] for seed in (0, 1)]
    assert sorted(keys[0]) == sorted(keys[1])
    assert keys[0] != keys[1]
    found = rows(tmp_path / "0")
    for name in {r.shard for r in found}:
        shares = Counter(r.source for r in found if r.shard == name)
        assert min(shares["a"], shares["b"]) > 0.1 * shares.total()
    steps = [int(b[1:]) - int(a[1:]) for a, b in zip(keys[0], keys[0][1:], strict=False)]
    assert Counter(steps)[1] < 0.1 * len(steps)


def test_keep_order_leaves_the_rows_as_they_are_in_the_input(tmp_path):
    src = llava_set(tmp_path / "raw", 100)
    run(src, tmp_path / "out", keep_order=True)
    assert [r.key for r in rows(tmp_path / "out")] == [f"sample-{i}" for i in range(100)]


def test_shards_are_of_bounded_size_in_each_piece(tmp_path):
    records = [{"id": i, "conversations": turns("q", "r" * 3000)} for i in range(100)]
    src = write_jsonl(tmp_path / "a.jsonl", records)
    run(src, tmp_path / "out", shard_bytes=1 << 17)
    infos = open_shards(tmp_path / "out").manifest.shards
    assert len(infos) > 10
    assert max(info.num_bytes for info in infos) < (1 << 17) + 60_000


def test_encoding_shards_again_equals_encoding_the_raw_data(tmp_path):
    src = llava_set(tmp_path / "raw", 120)
    other = Recipe(
        tile_size=28, max_tiles=6, tokens_per_tile=2, template="vicuna", loss="all", thumbnail=False
    )
    run(src, tmp_path / "first")
    run(tmp_path / "first", tmp_path / "again", recipe=other, keep_order=True)
    run(src, tmp_path / "direct", recipe=other)
    first, again, direct = (content(tmp_path / name) for name in ("first", "again", "direct"))
    assert again["index.arrow"] == direct["index.arrow"] != first["index.arrow"]
    assert again["tokenizer.json"] == direct["tokenizer.json"]
    manifests = [open_shards(tmp_path / name).manifest for name in ("again", "direct")]
    for name in ("fingerprint", "settings", "sources", "num_rows", "counts"):
        assert getattr(manifests[0], name) == getattr(manifests[1], name)
    for left, right in zip(rows(tmp_path / "again"), rows(tmp_path / "direct"), strict=True):
        assert left.key == right.key
        assert left.images == right.images
        assert left.messages == right.messages
        np.testing.assert_array_equal(left.input_ids, right.input_ids)
        np.testing.assert_array_equal(left.labels, right.labels)
        np.testing.assert_array_equal(left.image_spans, right.image_spans)


def test_shards_without_text_can_not_be_encoded_again(tmp_path):
    run(llava_set(tmp_path / "raw", 5), tmp_path / "out", drop_text=True)
    assert rows(tmp_path / "out")[0].messages is None
    with pytest.raises(ConfigError, match="written with --drop-text"):
        run(tmp_path / "out", tmp_path / "again")


def test_repeats_and_shares_of_a_meta_file_are_exact(tmp_path):
    for name, count in (("a", 10), ("b", 70), ("c", 100)):
        records = [{"id": f"{name}{i}", "conversations": turns("q", "r")} for i in range(count)]
        write_jsonl(tmp_path / f"{name}.jsonl", records)
    meta = {
        "a": {"annotation": "a.jsonl", "repeat_time": 3},
        "b": {"annotation": "b.jsonl", "repeat_time": 1.1},
        "c": {"annotation": "c.jsonl", "repeat_time": 0.29},
    }
    src = write_json(tmp_path / "meta.json", meta)
    run(src, tmp_path / "out")
    assert open_shards(tmp_path / "out").manifest.sources == {"a": 30, "b": 77, "c": 29}
    times = Counter(r.key for r in rows(tmp_path / "out"))
    assert {times[f"a{i}"] for i in range(10)} == {3}
    assert Counter(times[f"b{i}"] for i in range(70)) == {1: 63, 2: 7}
    chosen = {key for key in times if key.startswith("c")}
    assert len(chosen) == 29
    run(src, tmp_path / "other", seed=1)
    assert chosen != {r.key for r in rows(tmp_path / "other") if r.source == "c"}


def test_formats_without_a_text_file_go_the_same_way(tmp_path):
    members = []
    for i in range(40):
        members.append((f"{i:03d}.jpg", image_bytes(i)))
        members.append((f"{i:03d}.json", {"conversations": turns("<image>", f"{i}")}))
    write_tar(tmp_path / "a.tar", members)
    run(tmp_path / "a.tar", tmp_path / "tar")
    table = [
        {
            "__key__": f"{i:03d}",
            "image": {"bytes": image_bytes(i), "path": None},
            "conversations": turns("<image>", f"{i}"),
        }
        for i in range(40)
    ]
    write_parquet(tmp_path / "a.parquet", table)
    run(tmp_path / "a.parquet", tmp_path / "parquet")
    found = [sorted(rows(tmp_path / n), key=lambda r: r.key) for n in ("tar", "parquet")]
    assert [r.key for r in found[0]] == [f"{i:03d}" for i in range(40)]
    for left, right in zip(*found, strict=True):
        assert (left.key, left.images, left.messages) == (right.key, right.images, right.messages)
        np.testing.assert_array_equal(left.input_ids, right.input_ids)


# --- what is rejected ------------------------------------------------------------------------


@pytest.fixture
def bad_set(tmp_path):
    folder = tmp_path / "raw"
    folder.mkdir()
    good = image_bytes(1)
    (folder / "good.jpg").write_bytes(good)
    (folder / "cut.jpg").write_bytes(good[: len(good) // 2])
    (folder / "text.jpg").write_bytes(b"<html>404 Not Found</html>")
    (folder / "head.jpg").write_bytes(good[:30])
    (folder / "phone.jpg").write_bytes(b"\0\0\0\x18ftypheic" + bytes(40))
    (tmp_path / "secret.jpg").write_bytes(good)
    cases = {
        "good": {"image": "good.jpg", "conversations": turns("<image>q", "a")},
        "cut": {"image": "cut.jpg", "conversations": turns("<image>q", "a")},
        "html": {"image": "text.jpg", "conversations": turns("<image>q", "a")},
        "head": {"image": "head.jpg", "conversations": turns("<image>q", "a")},
        "phone": {"image": "phone.jpg", "conversations": turns("<image>q", "a")},
        "missing": {"image": "none.jpg", "conversations": turns("<image>q", "a")},
        "dots": {"image": "../secret.jpg", "conversations": turns("<image>q", "a")},
        "absolute": {"image": str(tmp_path / "secret.jpg"), "conversations": turns("q", "a")},
        "url": {"image": "https://x.org/a.jpg", "conversations": turns("<image>q", "a")},
        "empty": {"conversations": []},
        "marks": {"image": "good.jpg", "conversations": turns("<image><image>q", "a")},
        "role": {"conversations": [{"from": "wizard", "value": "a"}]},
        "blank": {"conversations": turns(" ", "\n")},
        "no answer": {"conversations": [{"from": "human", "value": "q"}]},
        "surrogate": {"conversations": turns("\ud800", "a")},
        "long": {"conversations": turns("q", "a" * 5000)},
    }
    lines = [json.dumps({"id": key, **case}) for key, case in cases.items()]
    (folder / "a.jsonl").write_text("\n".join(lines) + '\n{"id": "broken"\n')
    return folder / "a.jsonl"


CATEGORIES = {
    "html": "damaged image",
    "head": "damaged image",
    "phone": "kind of image",
    "missing": "image is missing",
    "dots": "outside the image root",
    "absolute": "outside the image root",
    "url": "image is a URL",
    "empty": "no turn",
    "marks": "marks and images",
    "role": "unknown role",
    "blank": "conversation",
    "no answer": "no loss token",
    "surrogate": "not a record",
    "long": "too long",
    "": "broken JSON",
}


def test_each_kind_of_bad_record_is_rejected_with_its_reason(tmp_path, bad_set):
    recipe = Recipe(
        tile_size=28, max_tiles=4, tokens_per_tile=4, max_tokens=1000, oversize="reject"
    )
    summary = run(bad_set, tmp_path / "out", recipe=recipe)
    assert {r.key for r in rows(tmp_path / "out")} == {"good", "cut"}
    found = rejected(tmp_path / "out")
    assert {entry["key"]: entry["category"] for entry in found} == CATEGORIES
    assert all(len(entry["reason"]) > 10 and entry["where"] for entry in found)
    facts = summary.as_dict()
    assert (facts["read"], facts["written"], facts["rejected"]) == (17, 2, 15)
    assert facts["reasons"] == dict(Counter(CATEGORIES.values()).most_common())


def test_check_images_finds_what_a_header_does_not_show(tmp_path, bad_set):
    run(bad_set, tmp_path / "out", check_images=True)
    cut = next(entry for entry in rejected(tmp_path / "out") if entry["key"] == "cut")
    assert cut["category"] == "damaged image"


def test_allow_outside_root_reads_them(tmp_path, bad_set):
    run(bad_set, tmp_path / "out", allow_outside_root=True)
    keys = {r.key for r in rows(tmp_path / "out")}
    assert {"dots", "absolute"} <= keys
    assert "url" not in keys


@pytest.mark.parametrize("workers", [1, 2])
def test_strict_makes_the_first_rejected_sample_fatal_and_names_it(tmp_path, workers):
    records = [{"id": f"r{i}", "conversations": turns("q", "a")} for i in range(200)]
    records[77] = {"id": "bad one", "conversations": []}
    src = write_jsonl(tmp_path / "a.jsonl", records)
    match = r"sample 'bad one' \(a.jsonl line 78\) is rejected: .* at least one turn"
    with pytest.raises(SampleError, match=match):
        run(src, tmp_path / "out", strict=True, workers=workers)
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert run(src, tmp_path / "out").as_dict()["rejected"] == 1  # goes on without --strict


def test_an_empty_data_set_is_an_error(tmp_path):
    write_json(tmp_path / "a.json", [])
    (tmp_path / "b.jsonl").write_text("\n\n")
    with pytest.raises(ConfigError, match=r"the data set is empty: no record found in a\.json"):
        run(tmp_path / "a.json", tmp_path / "out")
    with pytest.raises(ConfigError, match="is empty"):
        run(tmp_path / "b.jsonl", tmp_path / "out")


def test_a_data_set_with_nothing_to_write_is_an_error_that_leaves_the_way_free(tmp_path):
    records = [{"id": i, "image": f"{i}.jpg", "caption": "x"} for i in range(5)]
    src = write_jsonl(tmp_path / "a.jsonl", records)
    with pytest.raises(ConfigError, match=r"all 5 .* rejected: 5 image is missing\. The first: "):
        run(src, tmp_path / "out")
    assert len(rejected(tmp_path / "out")) == 5
    (tmp_path / "images").mkdir()
    for i in range(5):
        (tmp_path / "images" / f"{i}.jpg").write_bytes(image_bytes(i))
    assert run(src, tmp_path / "out", image_root=tmp_path / "images").as_dict()["written"] == 5


# --- limits ----------------------------------------------------------------------------------


def test_oversize_decides_what_becomes_of_long_samples(tmp_path):
    (tmp_path / "a.jpg").write_bytes(image_bytes(0, (112, 112)))
    record = {"id": "x", "image": "a.jpg", "conversations": turns("<image>", "answer " * 20)}
    src = write_jsonl(tmp_path / "a.jsonl", [record, {"caption": "short"}])
    sizes = {}
    for oversize in ("truncate", "fewer-tiles", "reject"):
        recipe = Recipe(
            tile_size=28, max_tiles=12, tokens_per_tile=16, max_tokens=300, oversize=oversize
        )
        summary = run(src, tmp_path / oversize, recipe=recipe).as_dict()
        sizes[oversize] = {r.key: len(r.input_ids) for r in rows(tmp_path / oversize)}
        if oversize == "truncate":
            assert summary["truncated"] == 1
        if oversize == "fewer-tiles":
            assert summary["tiles_reduced"] == 1
    assert sizes["truncate"]["x"] == 300
    assert 200 < sizes["fewer-tiles"]["x"] <= 300
    assert "x" not in sizes["reject"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("256MiB", 256 << 20), ("64M", 64 << 20), ("1.5 GiB", 3 << 29), ("1000", 1000), ("7KB", 7168)],
)
def test_sizes_are_read_with_their_units(text, expected):
    assert parse_bytes(text) == expected


def test_wrong_settings_are_refused(tmp_path):
    src = llava_set(tmp_path / "raw", 1)
    with pytest.raises(ConfigError, match="a size must be a number"):
        parse_bytes("many")
    with pytest.raises(ConfigError, match="--shard-bytes must be at least 64 KiB"):
        run(src, tmp_path / "out", shard_bytes=1)
    with pytest.raises(ConfigError, match="--workers must be at least 1"):
        run(src, tmp_path / "out", workers=0)
    with pytest.raises(ConfigError, match="--max-tokens must be at least 2"):
        Recipe(max_tokens=1)


# --- where it may write ----------------------------------------------------------------------


def test_out_inside_src_or_equal_to_it_is_refused(tmp_path):
    llava_set(tmp_path / "raw", 3)
    (tmp_path / "alias").symlink_to(tmp_path / "raw")
    for src, out in [
        ("raw", "raw"),
        ("raw", "raw/images/out"),
        ("raw", "alias/out"),
        ("alias", "raw/out"),
        ("raw/**/*.json", "raw/out"),
        ("raw/llava_instruct.json", "raw/llava_instruct.json"),
    ]:
        with pytest.raises(ConfigError, match="OUT must"):
            run(tmp_path / src, tmp_path / out)


def test_shards_are_not_written_over_themselves(tmp_path):
    run(llava_set(tmp_path / "raw", 3), tmp_path / "out")
    with pytest.raises(ConfigError, match="OUT must not be SRC"):
        run(tmp_path / "out", tmp_path / "out", overwrite=True)
    assert len(rows(tmp_path / "out")) == 3


def test_a_folder_with_other_things_is_left_alone(tmp_path):
    src = llava_set(tmp_path / "raw", 3)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").touch()
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match="holds other things"):
            run(src, tmp_path / "out", overwrite=overwrite)
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["thesis.tex"]
    with pytest.raises(ConfigError, match="OUT must be a folder"):
        run(src, tmp_path / "out" / "thesis.tex")


def test_a_complete_set_is_replaced_only_with_overwrite(tmp_path):
    src = llava_set(tmp_path / "raw", 100)
    run(src, tmp_path / "out")
    (tmp_path / "out" / "notes.txt").touch()
    few = llava_set(tmp_path / "few", 3)
    with pytest.raises(ConfigError, match=r"holds a complete set of shards.*--overwrite"):
        run(few, tmp_path / "out")
    run(few, tmp_path / "out", overwrite=True)
    assert len(rows(tmp_path / "out")) == 3
    assert len(list((tmp_path / "out").glob("shard-*"))) == 1
    assert (tmp_path / "out" / "notes.txt").exists()
