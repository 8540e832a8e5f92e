import io
import pickle
import struct
import threading
import warnings

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from omniload.errors import ConfigError, SampleError
from omniload.images import (
    MAX_PIXELS,
    decode,
    image_kind,
    image_size,
    missing_codecs,
    pil_info,
    resize,
)
from omniload.images.resize import as_batch
from tests.images_corpus import encode, exif, noise, photo, png, rgb_of

WIDTH, HEIGHT = 60, 40
KINDS = {
    "jpeg": ("JPEG", {}),
    "png": ("PNG", {}),
    "gif": ("GIF", {}),
    "webp": ("WEBP", {}),
    "bmp": ("BMP", {}),
    "tiff": ("TIFF", {}),
    "avif": ("AVIF", {}),
    "jpeg2000": ("JPEG2000", {}),
    "ppm": ("PPM", {}),
    "ico": ("ICO", {"sizes": [(WIDTH, HEIGHT)]}),
}


def readable(kind):
    if kind in missing_codecs():
        pytest.skip(missing_codecs()[kind])


def over_white(rgba):
    """Alpha onto white in exact integers, rounded to nearest."""
    colour, alpha = rgba[..., :3].astype(np.int64), rgba[..., 3:].astype(np.int64)
    return ((2 * (colour * alpha + 255 * (255 - alpha)) + 255) // 510).astype(np.uint8)


# kinds and sizes


@pytest.mark.parametrize("kind", KINDS)
def test_kind_size_and_pixels_of_every_kind(kind):
    readable(kind)
    name, options = KINDS[kind]
    data = encode(photo(WIDTH, HEIGHT), name, **options)
    assert image_kind(data) == kind
    assert image_size(data) == (WIDTH, HEIGHT)
    pixels = decode(data)
    assert pixels.shape == (HEIGHT, WIDTH, 3)
    assert pixels.dtype == np.uint8
    assert pixels.flags.c_contiguous
    assert pixels.flags.writeable
    assert np.array_equal(pixels, np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))


@pytest.mark.parametrize("size", [(1, 1), (1, 37), (37, 1), (17, 3)])
@pytest.mark.parametrize("kind", ["jpeg", "png", "webp", "gif", "bmp", "tiff"])
def test_sides_of_one_pixel(kind, size):
    readable(kind)
    data = encode(photo(*size), KINDS[kind][0])
    assert image_size(data) == size
    assert decode(data).shape == (size[1], size[0], 3)


@pytest.mark.parametrize("options", [{"lossless": True}, {"lossless": False}, {"exif": exif(1)}])
def test_all_three_layouts_of_webp(options):
    readable("webp")
    data = encode(noise(33, 21), "WEBP", **options)
    assert image_size(data) == (33, 21)
    assert decode(data).shape == (21, 33, 3)


def test_size_is_read_without_decoding():
    whole = encode(noise(300, 200), "PNG")
    assert image_size(whole[:64]) == (300, 200)
    with pytest.raises(SampleError, match=r"damaged png image"):
        decode(whole[:64])


def test_memory_is_read_where_it_lies():
    for kind in ("JPEG", "PNG"):
        data = encode(photo(WIDTH, HEIGHT), kind)
        view = memoryview(data)
        assert image_size(view) == (WIDTH, HEIGHT)
        assert np.array_equal(decode(view), decode(data))


# orientation


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["jpeg", "png", "webp", "tiff", "avif"])
def test_exif_orientation_is_applied(kind, orientation):
    readable(kind)
    options = {"lossless": True} if kind == "webp" else {}
    tag = exif(orientation) if kind == "tiff" else exif(orientation).tobytes()
    data = encode(photo(WIDTH, HEIGHT), KINDS[kind][0], exif=tag, **options)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    assert image_size(data) == upright.size
    assert image_size(data) == ((HEIGHT, WIDTH) if orientation >= 5 else (WIDTH, HEIGHT))
    assert np.array_equal(decode(data), np.asarray(upright))


@pytest.mark.parametrize("damage", [b"", b"MM", b"II*\0\xff\xff\xff\xff", b"MM\0*\0\0\0\x08\0\x09"])
def test_damaged_exif_is_ignored(damage):
    data = encode(photo(WIDTH, HEIGHT), "JPEG", exif=b"Exif\0\0" + damage)
    assert image_size(data) == (WIDTH, HEIGHT)
    assert decode(data).shape == (HEIGHT, WIDTH, 3)


def test_an_orientation_out_of_range_is_ignored():
    for orientation in (0, 9, 77):
        data = encode(photo(WIDTH, HEIGHT), "JPEG", exif=exif(orientation))
        assert image_size(data) == (WIDTH, HEIGHT)


def test_exif_after_the_pixels_of_a_png_counts():
    before = encode(photo(WIDTH, HEIGHT), "PNG")
    tag = exif(6).tobytes().removeprefix(b"Exif\0\0")
    chunk = struct.pack(">I", len(tag)) + b"eXIf" + tag + b"\0\0\0\0"
    end = before.index(b"IEND") - 4
    data = before[:end] + chunk + before[end:]
    assert image_size(data) == (HEIGHT, WIDTH)
    assert decode(data).shape == (WIDTH, HEIGHT, 3)


# modes


def test_grey_is_copied_to_all_channels():
    grey = noise(WIDTH, HEIGHT, 1)
    assert np.array_equal(decode(encode(grey, "PNG")), rgb_of(grey))
    jpeg = decode(encode(grey, "JPEG"))
    assert (jpeg[:, :, 0] == jpeg[:, :, 1]).all()
    assert (jpeg[:, :, 0] == jpeg[:, :, 2]).all()


def test_one_bit_is_black_and_white():
    bits = noise(WIDTH, HEIGHT, 1) > 127
    data = encode(Image.fromarray(bits), "PNG")
    assert np.array_equal(decode(data), rgb_of(np.where(bits, 255, 0).astype(np.uint8)))


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
@pytest.mark.parametrize("order", ["<", ">"])
def test_16_bit_grey_gives_the_high_byte(kind, order):
    deep = noise(WIDTH, HEIGHT, 1, np.uint16)
    data = encode(deep.astype(f"{order}u2"), kind)
    assert np.array_equal(decode(data), rgb_of((deep >> 8).astype(np.uint8)))


def test_32_bit_grey_is_clipped_to_16_bits():
    values = np.array([[-5, 0, 255, 256, 65535, 65536, 2**31 - 1]], dtype=np.int32)
    expected = np.array([[0, 0, 0, 1, 255, 255, 255]], dtype=np.uint8)
    assert np.array_equal(decode(encode(values, "TIFF")), rgb_of(expected))


def test_16_bit_colour_gives_the_high_byte():
    deep = noise(WIDTH, HEIGHT, 3, np.uint16)
    assert np.array_equal(decode(png(deep, colour_type=2)), (deep >> 8).astype(np.uint8))


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_alpha_is_composed_onto_white(kind):
    rgba = noise(WIDTH, HEIGHT, 4)
    assert np.array_equal(decode(encode(rgba, kind)), over_white(rgba))


def test_grey_with_alpha_is_composed_onto_white():
    pixels = noise(WIDTH, HEIGHT, 2)
    rgba = np.concatenate([rgb_of(pixels[:, :, 0]), pixels[:, :, 1:]], axis=2)
    assert np.array_equal(decode(encode(Image.fromarray(pixels), "PNG")), over_white(rgba))


def test_16_bit_alpha_is_composed_by_its_high_byte():
    deep = noise(WIDTH, HEIGHT, 4, np.uint16)
    assert np.array_equal(
        decode(png(deep, colour_type=6)), over_white((deep >> 8).astype(np.uint8))
    )


def test_palette_gives_its_colours():
    image = Image.fromarray(photo(WIDTH, HEIGHT)).quantize(16)
    assert np.array_equal(decode(encode(image, "PNG")), np.asarray(image.convert("RGB")))


def test_transparent_palette_entries_are_composed_onto_white():
    image = Image.fromarray(photo(WIDTH, HEIGHT)).quantize(4)
    alphas = np.array([0, 100, 255, 200], dtype=np.uint8)
    rgb, index = np.asarray(image.convert("RGB")), np.asarray(image)
    expected = over_white(np.concatenate([rgb, alphas[index][:, :, None]], axis=2))
    data = encode(image, "PNG", transparency=alphas.tobytes())
    assert np.array_equal(decode(data), expected)


def test_a_transparent_palette_entry_of_a_gif_is_white():
    image = Image.fromarray(photo(WIDTH, HEIGHT)).quantize(4)
    data = encode(image, "GIF", transparency=2)
    index = np.asarray(image)
    pixels = decode(data)
    assert (pixels[index == 2] == 255).all()
    assert np.array_equal(pixels[index != 2], np.asarray(image.convert("RGB"))[index != 2])


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("colour_type", [0, 2])
def test_a_single_transparent_colour_is_white(colour_type, dtype):
    pixels = noise(WIDTH, HEIGHT, 3 if colour_type == 2 else 1, dtype) // 2
    pixels[5, 7] = np.iinfo(dtype).max // 4 * 3  # nowhere else
    marked = pixels[5, 7].reshape(-1)
    data = png(pixels, colour_type=colour_type, chunks=[(b"tRNS", marked.astype(">u2").tobytes())])
    decoded = decode(data)
    assert decoded[5, 7].tolist() == [255, 255, 255]
    high = (pixels >> (8 * pixels.itemsize - 8)).astype(np.uint8)
    expected = high if colour_type == 2 else rgb_of(high)
    assert (decoded != expected).any(axis=2).sum() == 1


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_transparent_grey_of_few_bits_is_white(depth):
    levels = 1 << depth
    pixels = np.arange(WIDTH * HEIGHT).reshape(HEIGHT, WIDTH) // 3 % levels
    for value in range(levels):
        chunk = (b"tRNS", struct.pack(">H", value))
        decoded = decode(png(pixels, colour_type=0, depth=depth, chunks=[chunk]))
        grey = (pixels * 255 // (levels - 1)).astype(np.uint8)
        expected = np.where(pixels == value, np.uint8(255), grey)
        assert np.array_equal(decoded, rgb_of(expected))


def test_cmyk_has_one_plain_conversion():
    ink = noise(WIDTH, HEIGHT, 4)
    decoded = decode(encode(Image.fromarray(ink, "CMYK"), "TIFF")).astype(np.int64)
    light = (255 - ink[..., :3].astype(np.int64)) * (255 - ink[..., 3:].astype(np.int64)) / 255
    assert np.abs(decoded - light).max() <= 1


def test_cmyk_jpeg_is_not_inverted():
    white = encode(Image.new("CMYK", (WIDTH, HEIGHT), (0, 0, 0, 0)), "JPEG")
    assert decode(white).min() > 250
    black = encode(Image.new("CMYK", (WIDTH, HEIGHT), (0, 0, 0, 255)), "JPEG")
    assert decode(black).max() < 5


@pytest.mark.parametrize("mode", ["F", "LAB"])
def test_modes_without_a_defined_range_are_refused(mode):
    image = Image.new(mode, (WIDTH, HEIGHT))  # converting to LAB would need littlecms
    with pytest.raises(SampleError, match=rf"TIFF images of mode {mode} have no defined RGB"):
        decode(encode(image, "TIFF"))


@pytest.mark.parametrize("kind", ["gif", "webp", "png", "avif", "tiff"])
def test_of_several_frames_the_first_counts(kind):
    readable(kind)
    frames = [Image.new("RGB", (WIDTH, HEIGHT), colour) for colour in ("red", "green", "blue")]
    options = {"lossless": True} if kind == "webp" else {}
    data = encode(frames[0], KINDS[kind][0], save_all=True, append_images=frames[1:], **options)
    assert np.abs(decode(data).astype(int) - [255, 0, 0]).max() <= 3
    assert image_size(data) == (WIDTH, HEIGHT)


def test_a_gif_frame_beyond_the_screen_widens_it():
    data = bytearray(encode(photo(WIDTH, HEIGHT), "GIF"))
    data[6:10] = struct.pack("<HH", 10, 10)  # the logical screen
    assert image_size(bytes(data)) == (WIDTH, HEIGHT)
    assert decode(bytes(data)).shape == (HEIGHT, WIDTH, 3)


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}, {"quality": 5}])
def test_jpeg_decodes_to_the_same_pixels_as_pil(options):
    data = encode(photo(121, 77), "JPEG", **options)
    assert np.array_equal(decode(data), np.asarray(Image.open(io.BytesIO(data))))


def test_jpeg_with_stray_bytes_between_segments_is_read():
    data = encode(photo(WIDTH, HEIGHT), "JPEG")
    frame = data.index(b"\xff\xc0")
    stray = data[:frame] + b"\0\1\2" + data[frame:]
    assert image_size(stray) == (WIDTH, HEIGHT)
    assert np.array_equal(decode(stray), decode(data))


# damage


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


def odd_tiff():
    """A TIFF whose Software tag reaches far beyond the end: PIL warns of it.

    The tag is the last one: up to version 12, PIL reads none after it.
    """
    data = bytearray(encode(photo(WIDTH, HEIGHT), "TIFF", software="x" * 100))
    at = data.find(struct.pack("<HHI", 305, 2, 101))
    data[at + 4 : at + 8] = struct.pack("<I", 50_000_000)
    return bytes(data)


def test_odd_tags_of_a_tiff_neither_warn_nor_change_the_filters_of_a_thread():
    data = odd_tiff()
    with pytest.warns(UserWarning, match="."):
        Image.open(io.BytesIO(data)).load()
    expected = decode(data)  # warnings are errors here
    go_on = threading.Event()

    def work():
        while not go_on.is_set():
            decode(data)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(200):
        with pytest.warns(RuntimeWarning, match="of the user"):
            warnings.warn("of the user", RuntimeWarning, stacklevel=1)
    go_on.set()
    for thread in threads:
        thread.join()
    with pytest.raises(UserWarning, match="an error still"):
        warnings.warn("an error still", UserWarning, stacklevel=1)
    assert np.array_equal(decode(data), expected)


PLAIN = {
    b"P1": (b"P1\n# two\n3 2\n1 0 1\n0 1 0\n", [[0, 255, 0], [255, 0, 255]]),
    b"P2": (b"P2\n3 2\n15\n0 1 2\n13 14 15\n", [[0, 17, 34], [221, 238, 255]]),
    b"P3": (b"P3 1 2 255 1 2 3 255 254 253", [[[1, 2, 3]], [[255, 254, 253]]]),
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_portable_maps_are_read(name):
    data, expected = PLAIN[name]
    expected = np.array(expected, np.uint8)
    assert image_kind(data) == "ppm"
    assert image_size(data) == expected.shape[1::-1]
    assert np.array_equal(decode(data), expected if name == b"P3" else rgb_of(expected))
    with pytest.raises(SampleError, match="damaged ppm image"):
        decode(data[: len(data) // 2])


def test_the_largest_image_of_an_icon_counts_and_alpha_goes_onto_white():
    rgba = noise(48, 48, 4)
    sizes = [(16, 16), (48, 48), (32, 32)]
    for bitmap_format in ("png", "bmp"):
        file = io.BytesIO()
        Image.fromarray(rgba, "RGBA").save(file, "ICO", sizes=sizes, bitmap_format=bitmap_format)
        data = file.getvalue()
        assert image_kind(data) == "ico"
        assert image_size(data) == (48, 48)
        assert np.array_equal(decode(data), over_white(rgba))


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


# resize


@pytest.mark.parametrize("size", [(90, 50), (20, 90), (1, 1), (448, 448), (60, 40)])
def test_resize_gives_torchs_8_bit_result(size):
    image = photo(WIDTH, HEIGHT)
    slow = torch.nn.functional.interpolate(
        torch.from_numpy(image).permute(2, 0, 1)[None],
        size=size[::-1],
        mode="bicubic",
        antialias=True,
    )[0].permute(1, 2, 0)
    result = resize(image, *size)
    assert result.shape == (size[1], size[0], 3)
    assert result.flags.c_contiguous
    assert np.array_equal(result, slow.numpy())


def test_torch_keeps_pixels_interleaved_given_these_strides():
    # what makes resize quick; with other strides it is up to three times slower
    batch = as_batch(photo(WIDTH, HEIGHT))
    resized = torch.nn.functional.interpolate(batch, size=(90, 50), mode="bicubic", antialias=True)
    assert resized.permute(0, 2, 3, 1).is_contiguous()


def test_resize_is_what_pil_does_within_two_levels():
    image = photo(200, 120)
    mine = resize(image, 90, 300).astype(int)
    pils = np.asarray(Image.fromarray(image).resize((90, 300), Image.Resampling.BICUBIC))
    assert np.abs(mine - pils).max() <= (0 if pil_info().simd else 2)


def test_resize_takes_any_memory_layout():
    image = photo(WIDTH, HEIGHT)
    expected = resize(image, 31, 17)
    turned = np.ascontiguousarray(image[::-1])[::-1]
    frozen = image.copy()
    frozen.flags.writeable = False
    for variant in (turned, frozen):
        assert np.array_equal(resize(variant, 31, 17), expected)


@pytest.mark.parametrize(
    ("image", "size", "message"),
    [
        (np.zeros((4, 4), np.uint8), (2, 2), r"uint8 \(h, w, 3\), got uint8 \(4, 4\)"),
        (np.zeros((4, 4, 3), np.float32), (2, 2), r"got float32"),
        (np.zeros((0, 4, 3), np.uint8), (2, 2), r"got uint8 \(0, 4, 3\)"),
        (np.zeros((4, 4, 3), np.uint8), (0, 2), r"sides of at least 1, got 0x2"),
    ],
)
def test_resize_refuses_what_is_no_image(image, size, message):
    with pytest.raises(ConfigError, match=message):
        resize(image, *size)


def test_of_several_exif_segments_the_first_counts():
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encode(photo(32, 20), "JPEG", exif=exif)
    second = b"\xff\xe1\x00\x0cExif\0\0more"
    end = 4 + int.from_bytes(data[4:6], "big")  # of the first segment
    both = data[:end] + second + data[end:] if data[2:4] == b"\xff\xe1" else None
    if both is None:  # a JFIF segment stands first: put the other Exif before the scan
        at = data.index(b"\xff\xdb")
        both = data[:at] + second + data[at:]
    assert image_size(both) == image_size(data)
    assert np.array_equal(decode(both), decode(data))


def test_views_of_arrow_buffers_are_read():
    import pyarrow

    data = encode(photo(16, 12), "JPEG")
    view = memoryview(pyarrow.py_buffer(data))
    assert view.format == "b"
    assert np.array_equal(decode(view), decode(data))
    assert image_size(view) == image_size(data)


def test_an_image_with_an_endless_side_is_refused():
    data = encode(Image.new("L", (1, 100_001)), "PNG")
    with pytest.raises(SampleError, match="too long: at most 100000 pixels a side, got 1x100001"):
        image_size(data)
