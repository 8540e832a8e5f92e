import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload.errors import ConfigError
from omniload.tools.sources import READERS, RawSample, Rejection
from omniload.tools.sources.detect import find_input
from omniload.tools.sources.media import ImageLoader
from tests.data_makers import (
    data_uri,
    image_bytes,
    llava_records,
    llava_set,
    texts,
    turns,
    write_json,
    write_jsonl,
    write_parquet,
    write_tar,
)


def read_all(src, *, loader=None, **options):
    """Everything that the readers give, file by file, span by span."""
    found = []
    for file in find_input(src, **options):
        for span in READERS[file.kind].scan(file):
            if isinstance(span, Rejection):
                found.append(span)
            else:
                found += READERS[file.kind].read(file, span, loader or ImageLoader())
    return found


def only(found):
    assert len(found) == 1
    return found[0]


# --- formats, laid out as in the wild --------------------------------------------------------


def check_llava(found, records, images):
    assert [sample.key for sample in found] == [record["id"] for record in records]
    for sample, record in zip(found, records, strict=True):
        assert isinstance(sample, RawSample), sample
        names = record.get("image", [])
        names = [names] if isinstance(names, str) else names
        assert sample.images == tuple((images / name).read_bytes() for name in names)
        assert [m.content for m in sample.messages] == [t["value"] for t in record["conversations"]]


def test_llava_json_with_an_image_root(tmp_path):
    records = llava_records(tmp_path, 70)
    path = write_json(tmp_path / "llava_v1_5_mix.json", records)
    found = read_all(path, image_root=tmp_path / "images")
    check_llava(found, records, tmp_path / "images")
    assert {sample.source for sample in found} == {"llava_v1_5_mix"}
    assert found[41].where == "llava_v1_5_mix.json record 41"


def test_llava_json_lines_beside_their_images(tmp_path):
    path = llava_set(tmp_path, 70, "train.jsonl")
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = read_all(path)
    check_llava(found, records, tmp_path)
    assert found[41].where == "train.jsonl line 42"


def test_a_byte_order_mark_is_passed_over(tmp_path):
    records = [{"id": "x", "conversations": turns("ü", "y")}]
    for name, write in (("a.json", write_json), ("b.jsonl", write_jsonl)):
        path = write(tmp_path / name, records)
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
        assert only(read_all(path)).key == "x"


def test_a_broken_line_costs_that_line_only(tmp_path):
    lines = [json.dumps({"id": i, "conversations": turns("q", "a")}) for i in range(4)]
    lines[1] = '{"id": 1, "conversations": ['
    lines[2] = ""
    path = tmp_path / "a.jsonl"
    path.write_bytes("\n".join(lines).encode() + b"\n" + b'{"id": "\xff\xfe"}' + b"\n[[1]]")
    found = read_all(path)
    assert [isinstance(f, RawSample) for f in found] == [True, False, True, False, False]
    assert found[1].where == "a.jsonl line 2"
    assert found[1].category == found[3].category == "broken JSON"
    assert "must be an object" in found[4].reason


def test_a_broken_array_is_refused_at_once_with_the_place(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('[{"id": 1},\n {"id": 2}\n {"id": 3}]')
    with pytest.raises(ConfigError, match="',' or ']' must follow a record, at line 3, column 2"):
        read_all(path)
    path.write_text('[{"id": 1},\n {"id": "2')
    with pytest.raises(ConfigError, match=r"Unterminated string.* at line 2"):
        read_all(path)
    path.write_text('[{"id": 1}')
    with pytest.raises(ConfigError, match="must follow a record"):
        read_all(path)


@settings(max_examples=40, deadline=None)
@given(
    records=st.lists(
        st.integers()
        | st.dictionaries(st.text(max_size=5), st.text(max_size=20) | st.integers(), max_size=3),
        max_size=100,
    ),
    indent=st.sampled_from([None, 1]),
    ascii_only=st.booleans(),
    block=st.sampled_from([1, 7, 64, 1 << 22]),
)
def test_spans_of_an_array_hold_exactly_its_records(
    tmp_path_factory, records, indent, ascii_only, block
):
    from omniload.tools.sources import json_array
    from omniload.tools.sources.base import InputFile

    path = tmp_path_factory.mktemp("json") / "a.json"
    text = json.dumps(records, indent=indent, ensure_ascii=ascii_only)
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    file = InputFile(
        kind="json", path=str(path), label="a", source="a", image_root=str(path.parent)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_array, "_BLOCK", block)
        spans = list(json_array.scan(file))
    data = path.read_bytes()
    found = []
    for span in spans:
        part = json.loads(b"[" + data[span.start : span.stop] + b"]")
        assert (span.first, span.count) == (len(found), len(part))
        found += part
    assert found == records


def test_sharegpt_with_openai_parts_and_data_uris(tmp_path):
    data = image_bytes(3)
    record = {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": data_uri(data)}},
                    {"type": "text", "text": "What?"},
                ],
            },
            {"role": "assistant", "content": "That."},
        ]
    }
    sample = only(read_all(write_jsonl(tmp_path / "openai.jsonl", [record])))
    assert sample.images == (data,)
    assert sample.key == "openai:0"


def test_an_internvl_meta_file_names_several_sets(tmp_path):
    llava_set(tmp_path / "one", 4, "one.jsonl")
    llava_set(tmp_path / "two", 40, "two.json")
    meta = {
        "first": {"root": "one", "annotation": "one/one.jsonl", "repeat_time": 2, "length": 4},
        "second": {"root": str(tmp_path / "two"), "annotation": "two/two.json"},
    }
    path = write_json(tmp_path / "meta.json", meta)
    files = find_input(path)
    assert [(f.source, f.kind, f.repeat) for f in files] == [
        ("first", "jsonl", 2.0),
        ("second", "json", 1.0),
    ]
    found = read_all(path)
    assert len(found) == 44
    assert all(isinstance(sample, RawSample) for sample in found)


@pytest.mark.parametrize(
    ("entry", "match"),
    [
        ({"annotation": "none.jsonl"}, "annotation of set 'a' does not exist"),
        ({"annotation": "x.jsonl", "root": "nowhere"}, "root of set 'a' does not exist"),
        ({"annotation": "x.jsonl", "repeat_time": 0}, "repeat_time of set 'a' .* got 0"),
        ({"annotation": "x.jsonl", "repeat_time": "2"}, "repeat_time of set 'a' .* got '2'"),
        ({"annotation": "s3://b/x.jsonl"}, "must be a local path"),
        ({"annotation": 3}, "must be a path, got 3"),
    ],
)
def test_a_wrong_entry_of_a_meta_file_is_named(tmp_path, entry, match):
    write_jsonl(tmp_path / "x.jsonl", [{"conversations": turns("q", "a")}])
    path = write_json(tmp_path / "meta.json", {"a": entry})
    with pytest.raises(ConfigError, match=match):
        find_input(path)


def webdataset_members():
    one, two, three = image_bytes(1), image_bytes(2, kind="PNG"), image_bytes(3, kind="WEBP")
    members = [
        ("set/0001.jpg", one),
        ("set/0001.json", {"conversations": turns("<image>\nWhat?", "One.")}),
        ("set/0002.1.png", two),
        ("set/0002.0.jpg", one),
        ("set/0002.10.webp", three),
        ("set/0002.json", {"messages": [{"role": "user", "content": "<image><image><image>"},
                                        {"role": "assistant", "content": "Three."}]}),
        ("set/0003.txt", b"A caption. \n"),
        ("set/0003.jpeg", one),
        ("set/._0003.jpeg", b"junk of another system"),
        ("set/0004.json", {"id": "mine", "conversations": turns("No image?", "None.")}),
        ("set/0005.json", {"image": ["0005.b.jpg", "a.jpg"], "question": "<image><image>",
                           "answer": "Named."}),
        ("set/0005.a.jpg", one),
        ("set/0005.b.jpg", two),
        ("set/0006.json", {"image": "coco/17.jpg", "conversations": turns("<image>", "Packed.")}),
        ("set/0006.jpg", three),
        ("set/0007.jpg", one),
    ]  # fmt: skip
    return members, (one, two, three)


def test_webdataset_samples_of_all_shapes(tmp_path):
    members, (one, two, three) = webdataset_members()
    found = read_all(write_tar(tmp_path / "shard-000000.tar", members))
    assert [f.key for f in found] == [
        *("set/0001", "set/0002", "set/0003", "mine", "set/0005", "set/0006", "set/0007")
    ]
    assert [f.images for f in found[:6]] == [
        (one,),
        (one, two, three),
        (one,),
        (),
        (two, one),
        (three,),
    ]
    assert texts(found[2]) == [("user", "<image>"), ("assistant", "A caption.")]
    assert found[6].category == "no turn"
    assert found[1].where.startswith("shard-000000.tar sample at byte ")


def test_a_folder_or_glob_of_tars_is_one_source(tmp_path):
    members, _ = webdataset_members()
    (tmp_path / "mine").mkdir()
    for i in range(2):
        write_tar(tmp_path / "mine" / f"{i:05d}.tar", members)
    for src in (tmp_path / "mine", tmp_path / "mine" / "*.tar"):
        found = read_all(src)
        assert len(found) == 14
        assert {f.source for f in found} == {"mine"}


def test_a_damaged_tar_header_costs_its_sample_and_is_reported(tmp_path):
    path = tmp_path / "a.tar"
    members = []
    for i in range(100):
        members += [(f"{i:04d}.jpg", image_bytes(i)), (f"{i:04d}.json", {"caption": f"{i}"})]
    write_tar(path, members)
    with tarfile.open(path) as tar:
        header = tar.getmember("0010.jpg").offset
    data = bytearray(path.read_bytes())
    data[header : header + 100] = b"\xff" * 100
    path.write_bytes(bytes(data))
    found = read_all(path)
    lost = [f for f in found if isinstance(f, Rejection)]
    samples = [f for f in found if isinstance(f, RawSample)]
    assert len(samples) >= 99
    assert {s.key for s in samples} >= {f"{i:04d}" for i in range(100) if i != 10}
    assert lost[0].category == "damaged tar"
    assert lost[0].where.startswith(f"a.tar bytes {header} to ")


def test_a_tar_that_was_cut_short_says_so(tmp_path):
    members = [(f"{i:04d}.json", {"caption": f"{i}" * 600}) for i in range(10)]
    path = write_tar(tmp_path / "a.tar", members)
    data = path.read_bytes()
    with tarfile.open(path) as tar:
        at = tar.getmember("0008.json").offset
    path.write_bytes(data[: at + 700])
    found = read_all(path)
    assert [f.key for f in found if isinstance(f, RawSample)] == [f"{i:04d}" for i in range(8)]
    assert "cut short" in only([f for f in found if isinstance(f, Rejection)]).reason


def test_long_names_and_several_archives_in_one_file(tmp_path):
    name = "a/" * 80 + "0001"
    write_tar(tmp_path / "1.tar", [(f"{name}.json", {"caption": "ä"})])
    with tarfile.open(tmp_path / "2.tar", "w", format=tarfile.GNU_FORMAT) as tar:
        (tmp_path / "x").write_text(json.dumps({"caption": "b"}))
        tar.add(tmp_path / "x", arcname=name + "2.json")
    both = (tmp_path / "1.tar").read_bytes() + (tmp_path / "2.tar").read_bytes()
    (tmp_path / "both.tar").write_bytes(both)
    assert [f.key for f in read_all(tmp_path / "both.tar")] == [name, name + "2"]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_spans_of_a_tar_give_what_one_walk_gives_whatever_the_damage(tmp_path_factory, seed):
    rng = np.random.default_rng(seed)
    members = [
        (f"{i // 2:03d}.{'jpg' if i % 2 else 'json'}", {"caption": "x" * int(rng.integers(900))})
        for i in range(80)
    ]
    path = write_tar(tmp_path_factory.mktemp("tar") / "a.tar", members)
    data = bytearray(path.read_bytes())
    for _ in range(int(rng.integers(0, 4))):
        at = int(rng.integers(len(data)))
        data[at : at + 40] = rng.bytes(len(data[at : at + 40]))
    path.write_bytes(bytes(data[: int(rng.integers(len(data) // 2, len(data)))]))
    found = read_all(path)
    numbers = [f.number for f in found if f.number >= 0]
    assert numbers == list(range(len(numbers)))


def test_a_compressed_tar_is_refused_with_the_remedy(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w:gz"):
        pass
    with pytest.raises(ConfigError, match=r"compressed with gzip.* Unpack it"):
        read_all(tmp_path / "a.tar")


def test_hugging_face_parquet_with_image_structs(tmp_path):
    one, two = image_bytes(1), image_bytes(2, kind="PNG")
    rows = [
        {
            "id": f"{i}",
            "images": [{"bytes": one, "path": "a.jpg"}, {"bytes": two, "path": None}][: i % 3],
            "conversations": turns("<image>" * (i % 3) + "Q", f"A{i}"),
            "unknown_column": i,
        }
        for i in range(10)
    ]
    (tmp_path / "hub" / "data").mkdir(parents=True)
    (tmp_path / "hub" / "README.md").write_text("a data set card")
    (tmp_path / "hub" / "dataset_infos.json").write_text("{}")
    write_parquet(tmp_path / "hub" / "data" / "train-00000-of-00002.parquet", rows[:7])
    write_parquet(tmp_path / "hub" / "data" / "train-00001-of-00002.parquet", rows[7:])
    found = read_all(tmp_path / "hub")
    assert [f.key for f in found] == [f"{i}" for i in range(10)]
    assert [f.images for f in found[:3]] == [(), (one,), (one, two)]
    assert found[8].where == "data/train-00001-of-00002.parquet row 1"
    assert {f.source for f in found} == {"hub"}


def test_parquet_with_one_image_and_question_and_answer(tmp_path):
    rows = [{"image": {"bytes": image_bytes(i), "path": None}, "question": "Q", "answer": "A"}
            for i in range(3)]  # fmt: skip
    found = read_all(write_parquet(tmp_path / "vqa.parquet", rows))
    assert [texts(f)[0] for f in found] == [("user", "<image>\nQ")] * 3
    assert found[2].images == (image_bytes(2),)


def test_parquet_without_a_known_column_and_damaged_parquet_are_refused(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", [{"pixels": 1}])
    with pytest.raises(ConfigError, match=r"no column that omniload knows: got \['pixels'\]"):
        read_all(path)
    path.write_bytes(b"PAR1" + bytes(100))
    with pytest.raises(ConfigError, match="can't be read as Parquet"):
        read_all(path)


# --- what SRC is -----------------------------------------------------------------------------


def test_kinds_are_told_by_content_not_by_name(tmp_path):
    (tmp_path / "lines.json").write_text('{"caption": "a"}\n{"caption": "b"}\n')
    (tmp_path / "array.txt").write_text(' \n[{"caption": "a"}]')
    assert find_input(tmp_path / "lines.json")[0].kind == "jsonl"
    assert find_input(tmp_path / "array.txt")[0].kind == "json"
    write_tar(tmp_path / "tar.bin", [("a.txt", b"x")])
    assert find_input(tmp_path / "tar.bin")[0].kind == "tar"


def test_mixed_kinds_need_a_choice(tmp_path):
    write_json(tmp_path / "a.json", [{"caption": "x"}])
    write_tar(tmp_path / "b.tar", [("a.txt", b"x")])
    with pytest.raises(ConfigError, match=r"1 of kind json, 1 of kind tar.*--format"):
        find_input(tmp_path)
    assert only(find_input(tmp_path, format_name="webdataset")).kind == "tar"
    assert only(find_input(tmp_path, format_name="llava")).kind == "json"


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "is empty"),
        (b"\x00\x01\x02", "of no kind that omniload reads"),
        (b'{"a": 1,\n "b": 2}', "is one JSON object"),
        (b"\xff\xfe[\x00", "neither JSON in UTF-8"),
    ],
)
def test_what_can_not_be_read_is_refused(tmp_path, content, match):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ConfigError, match=match):
        find_input(tmp_path / "a.json")


def test_nothing_there_is_an_error(tmp_path):
    for src in (tmp_path, tmp_path / "none.json", tmp_path / "*.tar"):
        with pytest.raises(ConfigError, match="no data found"):
            find_input(src)
    with pytest.raises(ConfigError, match="--image-root must be a folder"):
        find_input(tmp_path, image_root=tmp_path / "none")
    with pytest.raises(ConfigError, match=r"--format must be one of llava, .* got 'coco'"):
        find_input(tmp_path, format_name="coco")


def test_hidden_files_are_left_out(tmp_path):
    (Path(tmp_path) / ".cache").mkdir()
    write_json(tmp_path / ".cache" / "a.json", [{"caption": "x"}])
    write_json(tmp_path / ".b.json", [{"caption": "x"}])
    write_json(tmp_path / "c.json", [{"caption": "x"}])
    assert only(find_input(tmp_path)).label == "c.json"
