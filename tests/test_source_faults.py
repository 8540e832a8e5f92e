"""Input that a reader could take for less than it is: nothing of it is lost without a word."""

import io
import json
import tarfile

import pytest

from omniload.conversations import RefusedError, normalise
from omniload.errors import ConfigError
from omniload.tools.sources import READERS, RawSample, Rejection
from omniload.tools.sources.detect import find_input
from omniload.tools.sources.media import ImageLoader
from tests.data_makers import image_bytes, turns, write_tar


def read_all(src, **options):
    found = []
    for file in find_input(src, **options):
        for span in READERS[file.kind].scan(file):
            if isinstance(span, Rejection):
                found.append(span)
            else:
                found += READERS[file.kind].read(file, span, ImageLoader())
    return found


def reasons(found):
    return [f.reason for f in found if isinstance(f, Rejection)]


# --- JSON ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rest", ['\n[{"id": 2}]', " x", ', {"id": 2}]', "]", "\0\0"])
def test_what_follows_an_array_is_an_error_with_the_place(tmp_path, rest):
    path = tmp_path / "a.json"
    path.write_text('\n[{"id": 1}]' + rest)
    with pytest.raises(ConfigError, match=r"nothing may follow the '\]'.* at byte \d+, at line"):
        read_all(path)


def test_an_empty_array_and_space_after_an_array(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("[] [1]")
    with pytest.raises(ConfigError, match="nothing may follow"):
        read_all(path)
    path.write_text("[1] \r\n\t ")
    assert len(read_all(path)) == 1


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_no_line_of_utf_16_is_taken(tmp_path, encoding):
    record = {"id": "a", "conversations": turns("q", "an answer")}
    path = tmp_path / "a.jsonl"
    path.write_bytes("\n".join([json.dumps(record)] * 4).encode(encoding))
    found = find_input(path) if encoding == "utf-16" else None
    file = (found or find_input(plain(tmp_path)))[0]
    file = type(file)(**{**vars(file), "path": str(path)})
    (span,) = READERS["jsonl"].scan(file)
    lines = list(READERS["jsonl"].read(file, span, ImageLoader()))
    assert len(lines) == 4
    assert all("not UTF-8 (looks like UTF-16)" in reason for reason in reasons(lines))
    assert len(reasons(lines)) == 4


def test_a_line_of_nul_bytes_is_not_an_empty_one(tmp_path):
    path = plain(tmp_path)
    path.write_bytes(path.read_bytes() + b"\0" * 9 + b"\n")
    good, bad = read_all(path)
    assert isinstance(good, RawSample)
    assert "it holds NUL bytes" in bad.reason


def plain(folder):
    path = folder / "plain.jsonl"
    path.write_text(json.dumps({"caption": "x"}) + "\n")
    return path


# --- records ---------------------------------------------------------------------------------

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("record", "match"),
    [
        (
            {
                "messages": [
                    {"role": "user", "content": "q"},
                    {"role": "assistant", "content": None, "tool_calls": [CALL]},
                ]
            },
            "tool calls are not supported, and turn 1 has 'tool_calls'",
        ),
        (
            {"conversations": turns("q", "a"), "tools": '[{"name": "f"}]'},
            "tool calls are not supported, and the record has 'tools'",
        ),
        (
            {"messages": [{"role": "user", "content": None}]},
            "turn 0 has no text: it is null or missing",
        ),
        ({"caption": "x", "image": "a.jpg", "images": ["b.jpg"]}, "'image' and 'images' must be"),
    ],
)
def test_what_would_be_dropped_is_refused(record, match):
    with pytest.raises(RefusedError, match=match):
        normalise(record)


def test_empty_tools_and_equal_image_fields_are_nothing_to_refuse():
    record = {"caption": "x", "image": "a.jpg", "images": ["a.jpg"], "tools": "[]"}
    assert normalise(record).images == ("a.jpg",)


# --- tars ------------------------------------------------------------------------------------


def test_a_caption_without_its_image_is_refused_where_others_have_one(tmp_path):
    image = image_bytes()
    members = [("a.jpg", image), ("a.txt", b"A"), ("b.txt", b"B"), ("c.json", {"caption": "C"})]
    members += [("d.json", {"conversations": turns("q", "a")}), ("b.jpg", image)]
    found = read_all(write_tar(tmp_path / "a.tar", members))
    assert [f.key for f in found if isinstance(f, RawSample)] == ["a", "d"]
    lost = [f for f in found if isinstance(f, Rejection)]
    assert [f.key for f in lost] == ["b", "c", "b"]
    for rejection in lost[:2]:
        assert "the files of a key must lie next to each other" in rejection.reason


def test_a_tar_of_texts_alone_stays_one(tmp_path):
    found = read_all(write_tar(tmp_path / "a.tar", [("a.txt", b"A"), ("b.txt", b"B")]))
    assert all(isinstance(f, RawSample) for f in found)
    assert len(found) == 2


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_a_linked_member_costs_its_sample_and_is_named(tmp_path, kind):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        for name, content in (("a.jpg", image_bytes()), ("a.txt", b"A"), ("b.txt", b"B")):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        link = tarfile.TarInfo("b.jpg")
        link.type, link.linkname = kind, "a.jpg"
        tar.addfile(link)
    good, bad = read_all(path)
    assert isinstance(good, RawSample)
    assert bad.key == "b"
    assert "b.jpg is a link, and links in a tar are not followed" in bad.reason
