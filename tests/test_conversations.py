"""Records of every style become conversations, and images are found below their root."""

import json
import os

import pytest

from omniload.conversations import RefusedError, normalise
from omniload.tools.sources.media import ImageLoader
from tests.data_makers import (
    data_uri,
    texts,
    turns,
)


def test_llava_turns_become_user_and_assistant():
    found = normalise(
        {"id": 7, "image": "a.jpg", "conversations": turns("<image>\nWhat?", "That.")}
    )
    assert found.key == "7"
    assert texts(found) == [("user", "<image>\nWhat?"), ("assistant", "That.")]
    assert found.images == ("a.jpg",)


def test_llama_factory_records_keep_system_tools_and_several_images():
    record = {
        "messages": [
            {"role": "user", "content": "<image><image>Compare."},
            {"role": "function_call", "content": "{}"},
            {"role": "observation", "content": "3"},
            {"role": "assistant", "content": "Three."},
        ],
        "system": "Be brief.",
        "images": ["a.jpg", "b.jpg"],
    }
    roles = [role for role, _ in texts(normalise(record))]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]
    assert normalise(record).images == ("a.jpg", "b.jpg")


def test_content_parts_bring_their_own_images_in_order():
    record = {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "First"},
                    {"type": "image_url", "image_url": {"url": "a.jpg"}},
                    {"type": "image", "image": "b.jpg"},
                    {"type": "text", "text": "differ?"},
                ],
            },
            {"role": "assistant", "content": [{"type": "text", "text": "Yes."}]},
        ]
    }
    found = normalise(record)
    assert texts(found)[0] == ("user", "First\n<image>\n<image>\ndiffer?")
    assert found.images == ("a.jpg", "b.jpg")


def test_image_parts_without_a_source_take_the_listed_images():
    parts = [{"type": "image"}, {"type": "text", "text": "What?"}]
    record = {"messages": [{"role": "user", "content": parts}], "images": ["a.jpg"]}
    assert normalise(record).images == ("a.jpg",)
    with pytest.raises(RefusedError, match="no image is left"):
        normalise(record | {"images": []})


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"question": "Q", "answer": "A"}, [("user", "Q"), ("assistant", "A")]),
        ({"question": "Q", "answers": ["A", "B"]}, [("user", "Q"), ("assistant", "A")]),
        ({"query": "Q", "response": "A"}, [("user", "Q"), ("assistant", "A")]),
        (
            {"texts": [{"user": "Q", "assistant": "A", "source": "s"}]},
            [("user", "Q"), ("assistant", "A")],
        ),
        ({"caption": "A dog."}, [("user", ""), ("assistant", "A dog.")]),
        ({"conversations": json.dumps(turns("Q", "A"))}, [("user", "Q"), ("assistant", "A")]),
    ],
)
def test_other_known_styles_are_read(record, expected):
    assert texts(normalise(record)) == expected


def test_images_without_any_mark_are_put_at_the_start_of_the_first_user_turn():
    record = {"image": ["a.jpg", "b.jpg"], "conversations": turns("What?", "That.")}
    assert texts(normalise(record))[0] == ("user", "<image>\n<image>\nWhat?")
    assert texts(normalise({"image": "a.jpg", "caption": "A dog."}))[0] == ("user", "<image>")


def test_weights_of_turns_are_kept():
    record = {
        "messages": [
            {"role": "user", "content": "Q"},
            {"role": "assistant", "content": "A", "weight": 0},
            {"role": "assistant", "content": "B", "loss": True},
        ]
    }
    assert [m.weight for m in normalise(record).messages] == [None, 0, 1]
    record["messages"][1]["weight"] = 0.5
    with pytest.raises(RefusedError, match=r"'weight' of turn 1 must be 0 or 1, got 0\.5"):
        normalise(record)


@pytest.mark.parametrize(
    ("record", "match"),
    [
        ([], "must be an object, got list"),
        ({"id": 1}, "must have turns"),
        ({"conversations": []}, "at least one turn"),
        ({"conversations": "no JSON"}, "is text, but not JSON"),
        ({"conversations": 3}, "must be a list of turns, got int"),
        ({"conversations": [3]}, "turn 0 must be an object, got int"),
        ({"conversations": [{"from": "wizard", "value": "x"}]}, "roles .* got 'wizard'"),
        ({"conversations": [{"value": "x"}]}, "roles .* got None"),
        ({"conversations": [{"from": "human", "value": None}]}, "turn 0 has no text: it is null"),
        ({"conversations": turns("<image><image>", "x"), "image": "a"}, "expected 1 mark, got 2"),
        ({"conversations": turns("<image>", "x"), "image": ["a", "b"]}, "expected 2 marks, got 1"),
        ({"conversations": turns("<image>", "x")}, "expected 0 marks, got 1"),
        ({"conversations": [{"from": "gpt", "value": "x"}], "image": "a"}, "no user turn"),
        ({"conversations": turns("x", "y"), "video": "a.mp4"}, "only images .* 'video'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "audio"}]}]},
            "must be of type text, image or image_url, got 'audio'",
        ),
    ],
)
def test_what_is_not_a_conversation_is_refused_with_the_reason(record, match):
    with pytest.raises(RefusedError, match=match):
        normalise(record)


# --- image values ----------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path):
    (tmp_path / "root" / "sub").mkdir(parents=True)
    (tmp_path / "root" / "sub" / "a.jpg").write_bytes(b"inside")
    (tmp_path / "secret.jpg").write_bytes(b"outside")
    return tmp_path / "root"


def test_images_are_read_below_the_root(root):
    load = ImageLoader().load
    assert load("sub/a.jpg", str(root)) == b"inside"
    assert load("sub/../sub/a.jpg", str(root)) == b"inside"
    assert load(str(root / "sub" / "a.jpg"), str(root)) == b"inside"
    assert load({"bytes": b"raw", "path": "x"}, str(root)) == b"raw"
    assert load({"bytes": None, "path": "sub/a.jpg"}, str(root)) == b"inside"
    assert load(data_uri(b"raw"), str(root)) == b"raw"


def test_paths_that_leave_the_root_are_refused_unless_allowed(root):
    (root / "link.jpg").symlink_to(root.parent / "secret.jpg")
    (root / "folder").symlink_to(root.parent)
    outside = ["../secret.jpg", str(root.parent / "secret.jpg"), "link.jpg", "folder/secret.jpg"]
    for value in outside:
        with pytest.raises(RefusedError, match=r"outside its root.*--allow-outside-root"):
            ImageLoader().load(value, str(root))
        assert ImageLoader(allow_outside_root=True).load(value, str(root)) == b"outside"


def test_a_root_whose_name_starts_the_same_is_another_folder(root):
    (root.parent / "root2").mkdir()
    (root.parent / "root2" / "a.jpg").write_bytes(b"outside")
    with pytest.raises(RefusedError, match="outside its root"):
        ImageLoader().load("../root2/a.jpg", str(root))


def test_a_root_that_is_a_symlink_itself_is_followed(root):
    (root.parent / "alias").symlink_to(root)
    assert ImageLoader().load("sub/a.jpg", str(root.parent / "alias")) == b"inside"


@pytest.mark.parametrize(
    "value", ["https://example.com/a.jpg", "s3://bucket/a.jpg", "file:///etc/passwd", "HTTP://x/y"]
)
def test_urls_are_refused(root, value):
    with pytest.raises(RefusedError, match="must be a local file, got the URL"):
        ImageLoader(allow_outside_root=True).load(value, str(root))


def test_what_is_not_a_readable_image_file_is_refused(root):
    os.mkfifo(root / "pipe.jpg")
    (root / "empty.jpg").touch()
    for value, match in [
        ("none.jpg", "No such file"),
        ("sub", "can't be read|not a regular file"),
        ("pipe.jpg", "not a regular file"),
        ("empty.jpg", "is empty"),
        ("a\0b", "must be valid text"),
        ("\ud800.jpg", "must be valid text"),
        ("a" * 300, "name too long"),
        ("data:image/png,abc", "must be base64"),
        ("data:image/png;base64,@@", "must be base64"),
        (None, "must be a path, a data: URI or bytes, got NoneType"),
        (5, "got int"),
    ]:
        with pytest.raises(RefusedError, match=match):
            ImageLoader().load(value, str(root))
