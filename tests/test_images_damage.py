"""Damaged, endless and foreign images: pixels, or an error that says why."""

import io
import pickle
import struct
import threading
import warnings

import numpy as np
import pytest
from PIL import Image

from omniload.errors import SampleError
from omniload.images import (
    MAX_PIXELS,
    decode,
    image_size,
    missing_codecs,
    pil_info,
)
from tests.images_corpus import (
    HEIGHT,
    KINDS,
    WIDTH,
    encode,
    noise,
    photo,
    readable,
)


def test_no_bytes_at_all():
    for read in (image_size, decode):
        with pytest.raises(SampleError, match=r"the image is empty \(0 bytes\)"):
            read(b"")


@pytest.mark.parametrize("data", [b"x", b"<html>404</html>", b"GIF", b"\xff\xd8", bytes(100)])
def test_what_is_not_an_image(data):
    for read in (image_size, decode):
        with pytest.raises(SampleError, match=r"not an image of a known kind: .* got \d+ bytes"):
            read(data)


def test_heic_names_the_remedy():
    data = struct.pack(">I", 24) + b"ftypheic\0\0\0\0mif1heic" + bytes(40)
    with pytest.raises(SampleError, match="heic images can't be read: convert them to JPEG"):
        image_size(data)


@pytest.mark.parametrize("kind", KINDS)
def test_truncated_files_say_so(kind):
    readable(kind)
    data = encode(noise(WIDTH, HEIGHT), KINDS[kind][0])
    for length in (len(data) // 4, len(data) // 2, len(data) * 3 // 4):
        with pytest.raises(SampleError, match=rf"damaged {kind} image: \S+"):
            decode(data[:length])


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_bytes_give_pixels_or_a_sample_error_and_nothing_else(kind):
    readable(kind)
    data = encode(photo(WIDTH, HEIGHT), KINDS[kind][0])
    rng = np.random.default_rng(list(KINDS).index(kind))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for turn in range(150):
            damaged = bytearray(data)
            reach = len(data) if turn % 2 else min(len(data), 200)
            for at in rng.integers(0, reach, 1 + turn % 5):
                damaged[at] = rng.integers(0, 256)
            try:
                pixels = decode(bytes(damaged))
            except SampleError as error:
                assert str(error)  # noqa: PT017
            else:
                assert image_size(bytes(damaged)) == pixels.shape[1::-1]


@pytest.mark.parametrize(
    ("width", "height"), [(20_000, 20_000), (2**31 - 1, 2**31 - 1), (MAX_PIXELS + 1, 1)]
)
def test_an_image_that_claims_too_many_pixels_is_not_decoded(width, height):
    data = bytearray(encode(photo(WIDTH, HEIGHT), "PNG"))
    data[16:24] = struct.pack(">II", width, height)
    for read in (image_size, decode):
        with pytest.raises(SampleError, match=rf"png image too large: at most {MAX_PIXELS} pixels"):
            read(bytes(data))


def test_sides_of_zero_are_damage():
    data = bytearray(encode(photo(WIDTH, HEIGHT), "PNG"))
    data[16:24] = struct.pack(">II", 0, 40)
    with pytest.raises(SampleError, match="sides must be at least 1, got 0x40"):
        image_size(bytes(data))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "ico"])
def test_pil_does_not_warn_of_large_images(monkeypatch, kind):
    readable(kind)
    data = encode(photo(WIDTH, HEIGHT), KINDS[kind][0])
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", WIDTH * HEIGHT - 1)  # 89 megapixels else
    with pytest.warns(Image.DecompressionBombWarning):
        Image.open(io.BytesIO(data))
    assert image_size(data) == (WIDTH, HEIGHT)
    assert decode(data).shape == (HEIGHT, WIDTH, 3)


def test_threads_decode_the_same_pixels():
    data = [encode(photo(WIDTH, HEIGHT, seed=seed), kind) for seed in range(4) for kind in
            ("JPEG", "PNG", "TIFF")]  # fmt: skip
    expected = [decode(item) for item in data]
    failures = []

    def work():
        for item, pixels in zip(data, expected, strict=True):
            if not np.array_equal(decode(item), pixels):
                failures.append(item)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_an_icon_that_hides_a_larger_image_is_damaged():
    data = bytearray(encode(photo(WIDTH, HEIGHT), "ICO", sizes=[(WIDTH, HEIGHT)]))
    at = data.find(b"IHDR") + 4
    data[at : at + 8] = struct.pack(">II", 30_000, 30_000)
    with pytest.raises(SampleError, match="an image of 30000x30000, listed as 60x40"):
        image_size(bytes(data))


# what is installed


def test_missing_codecs_agree_with_what_pil_can_write():
    missing = missing_codecs()
    for kind in ("jpeg", "png", "webp", "tiff", "avif"):
        name = KINDS[kind][0]
        if kind not in missing:
            assert decode(encode(photo(8, 8), name)).shape == (8, 8, 3)
    missing["jpeg"] = "a caller's copy"
    assert "jpeg" not in missing_codecs()


def test_a_missing_codec_is_an_error_with_the_remedy(monkeypatch):
    from omniload.images import kinds

    data = encode(photo(8, 8), "WEBP")
    lacking = set(missing_codecs())
    monkeypatch.setattr(kinds.features, "get_supported_modules", list)
    kinds._missing_codecs.cache_clear()
    try:
        assert set(missing_codecs()) == lacking | {"webp", "avif"}
        assert "libwebp" in missing_codecs()["webp"]
        with pytest.raises(SampleError, match=r"webp images can't be read here: PIL .* libwebp"):
            decode(data)
    finally:
        kinds._missing_codecs.cache_clear()


def test_pil_info_names_the_build():
    import PIL

    info = pil_info()
    assert info.version == PIL.__version__
    assert info.simd == ("post" in PIL.__version__)
    assert pickle.loads(pickle.dumps(info)) == info


def test_an_image_with_an_endless_side_is_refused():
    data = encode(Image.new("L", (1, 100_001)), "PNG")
    with pytest.raises(SampleError, match="too long: at most 100000 pixels a side, got 1x100001"):
        image_size(data)
