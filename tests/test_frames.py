import json

import pytest
from PIL import Image

from omniload.conversations import RefusedError
from omniload.errors import SampleError
from omniload.images import image_size, missing_codecs
from omniload.images.video import video_container
from omniload.shards import open_shards
from omniload.tools.preprocess_run import preprocess_data
from omniload.tools.recipe import Recipe
from omniload.tools.sources.frames import expand_frames, in_order
from omniload.tools.sources.media import ImageLoader
from tests.images_corpus import encode, photo

CONTAINERS = {
    "mp4": b"\0\0\0\x18ftypisom\0\0\2\0isomiso2",
    "mov": b"\0\0\0\x14ftypqt  \0\0\0\0",
    "webm or mkv": b"\x1aE\xdf\xa3\x01\0\0\0\0\0\0\x1f",
    "avi": b"RIFF\x24\0\0\0AVI LIST",
    "mpeg": b"\0\0\x01\xba\x44\0\x04\0",
    "flv": b"FLV\x01\x05\0\0\0\x09",
    "wmv": b"\x30\x26\xb2\x75\x8e\x66\xcf\x11\xa6\xd9",
}


def turns(question, answer="It runs."):
    return [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]


def frames_of(path):
    return {"clip": ["clip/1.jpg", "clip/2.jpg"], "more": ["more/1.jpg"]}.get(path)


@pytest.mark.parametrize(
    ("record", "images", "question"),
    [
        ({"video": "clip"}, ["clip/1.jpg", "clip/2.jpg"], "<image><image>What?"),
        ({"video": ["a.jpg", "b.jpg"]}, ["a.jpg", "b.jpg"], "<image><image>What?"),
        ({"videos": ["clip"]}, ["clip/1.jpg", "clip/2.jpg"], "<image><image>What?"),
        ({"videos": [["a.jpg", "b.jpg"]]}, ["a.jpg", "b.jpg"], "<image><image>What?"),
    ],
)
@pytest.mark.parametrize("mark", ["<video>", "<image>"])
def test_a_video_becomes_its_frames_and_its_mark_theirs(record, images, question, mark):
    expanded = expand_frames(record | {"conversations": turns(f"{mark}What?")}, frames_of)
    assert expanded == {"images": images, "conversations": turns(question)}


def test_several_videos_take_their_marks_in_order():
    record = {"videos": ["more", "clip"], "messages": turns("<video>, then <video>?")}
    assert expand_frames(record, frames_of) == {
        "images": ["more/1.jpg", "clip/1.jpg", "clip/2.jpg"],
        "messages": turns("<image>, then <image><image>?"),
    }


def test_a_folder_named_as_an_image_is_its_frames():
    record = {"image": ["still.png", "clip"], "conversations": turns("<image>or<image>?")}
    assert expand_frames(record, frames_of) == {
        "images": ["still.png", "clip/1.jpg", "clip/2.jpg"],
        "conversations": turns("<image>or<image><image>?"),
    }


@pytest.mark.parametrize(
    "record",
    [
        {"video": "clip", "conversations": turns("What?")},  # the images are put in front later
        {"video": "clip", "conversations": turns("<image>and<image>?")},  # one a frame
    ],
)
def test_text_that_needs_no_change_is_left(record):
    expanded = expand_frames(record, frames_of)
    assert expanded["conversations"] == record["conversations"]
    assert len(expanded["images"]) == 2


@pytest.mark.parametrize("record", [{"image": "a.jpg", "text": "x"}, {"text": "x"}, [3], None])
def test_records_without_videos_are_left(record):
    assert expand_frames(record, frames_of) is record


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"video": "a.MP4"}, "video containers are not supported yet, got 'a.MP4': extract its fr"),
        ({"image": "b.webm"}, "video containers are not supported yet, got 'b.webm'"),
        ({"videos": ["clip", "c.mkv"]}, "video containers are not supported yet, got 'c.mkv'"),
        ({"video": "nothing"}, "must be a folder of image files or a list of them, got 'nothing'"),
        ({"video": {"path": "x"}}, "must be a folder .* or a list of them, got 'dict'"),
        ({"video": "clip", "image": "a.jpg"}, "images or videos, not both: got 'image' and 'video"),
        ({"videos": [["a.jpg"], []]}, "a video has no frame"),
        (
            {"video": "clip", "conversations": turns("<video><video><video>")},
            "each video needs one mark <video>: expected 1 marks, got 3",
        ),
    ],
)
def test_what_is_no_video_is_refused_with_the_reason(record, message):
    with pytest.raises(RefusedError, match=message):
        expand_frames(record, frames_of)


def test_frames_come_in_the_order_of_their_numbers():
    assert in_order(["f10.jpg", "f2.jpg", "F1.jpg", "f2b.jpg", "x.jpg"]) == [
        "F1.jpg",
        "f2.jpg",
        "f2b.jpg",
        "f10.jpg",
        "x.jpg",
    ]


@pytest.mark.parametrize("name", CONTAINERS)
def test_containers_are_told_by_their_first_bytes(name, tmp_path):
    assert video_container(CONTAINERS[name]) == name
    (tmp_path / "frame.jpg").write_bytes(CONTAINERS[name])
    with pytest.raises(RefusedError, match=f"not supported yet, got the image .* in {name}"):
        ImageLoader().load("frame.jpg", str(tmp_path))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "AVIF", "TIFF"])
def test_images_are_not_taken_for_videos(kind):
    if kind.lower() in missing_codecs():
        pytest.skip(missing_codecs()[kind.lower()])
    assert video_container(encode(Image.fromarray(photo(8, 8)), kind)) is None


def test_a_folder_outside_the_root_or_without_images_is_refused(tmp_path):
    (tmp_path / "root" / "empty").mkdir(parents=True)
    loader = ImageLoader()
    with pytest.raises(RefusedError, match="leads outside its root"):
        loader.frames("..", str(tmp_path / "root"))
    with pytest.raises(RefusedError, match="the folder 'empty' must hold image files"):
        loader.frames("empty", str(tmp_path / "root"))
    for other in ("nothing", "", "data:x", "https://a/b", "a.jpg", "nul\0"):
        assert loader.frames(other, str(tmp_path / "root")) is None


def test_a_folder_of_frames_becomes_a_sample_of_several_images(tmp_path):
    clip = tmp_path / "clips" / "7"
    clip.mkdir(parents=True)
    for number in (1, 2, 10):
        (clip / f"{number}.png").write_bytes(encode(photo(20 + number, 20), "PNG"))
    (clip / "notes.txt").write_text("no frame")
    (tmp_path / "clips" / "8.mp4").write_bytes(CONTAINERS["mp4"])
    (tmp_path / "data.json").write_text(
        json.dumps(
            [
                {"id": "a", "video": "clips/7", "conversations": turns("<video>\nWhat happens?")},
                {"id": "b", "video": "clips/8.mp4", "conversations": turns("<video>\nWhat?")},
            ]
        )
    )
    recipe = Recipe(tile_size=28, max_tiles=1, tokens_per_tile=4)
    summary = preprocess_data(tmp_path / "data.json", tmp_path / "shards", recipe=recipe)
    assert summary.reasons == {"video container": 1}
    [line] = (tmp_path / "shards" / "rejected.jsonl").read_text().splitlines()
    assert "video containers are not supported yet" in json.loads(line)["reason"]
    record = open_shards(tmp_path / "shards").read(0)
    assert [image_size(image) for image in record.images] == [(21, 20), (22, 20), (30, 20)]
    assert record.messages[0].content == "<image><image><image>\nWhat happens?"


def test_a_video_in_place_of_an_image_is_named_by_the_header():
    with pytest.raises(SampleError, match="video containers are not supported yet, got mp4"):
        image_size(CONTAINERS["mp4"])
