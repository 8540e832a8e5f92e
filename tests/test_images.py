import io
import struct
import threading
import warnings

import numpy as np
import pytest
from PIL import Image, ImageOps

from omniload.errors import SampleError
from omniload.images import (
    decode,
    image_kind,
    image_size,
)
from tests.images_corpus import (
    HEIGHT,
    KINDS,
    WIDTH,
    encode,
    exif,
    noise,
    photo,
    png,
    readable,
    rgb_of,
)


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
