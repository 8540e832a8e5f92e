"""Headers of tars: read as Python's tarfile reads them, and past the damage where it stops."""

import io
import os
import tarfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload.errors import ConfigError, ShardError
from omniload.tars.archive import Archive
from omniload.tars.headers import parse_header
from omniload.tars.members import FILE, LINK, SPARSE, Damage, Member, Window
from tests.data_makers import write_tar
from tests.tar_makers import by_tarfile, header_of, info, overwrite, raw_tar, tar_members

FORMATS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)


def walk(path):
    with Archive(path) as archive:
        return list(archive.members())


def names(path):
    return [found.name for found in walk(path) if isinstance(found, Member)]


def damage(path):
    return [found for found in walk(path) if isinstance(found, Damage)]


@settings(max_examples=150, deadline=None)
@given(
    name=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1,
                 max_size=300),
    size=st.integers(0, 3000),
    kind=st.sampled_from(FORMATS),
    mtime=st.integers(0, 2**31),
)  # fmt: skip
def test_members_are_those_that_tarfile_finds(tmp_path_factory, name, size, kind, mtime):
    path = tmp_path_factory.mktemp("tar") / "a.tar"
    with tarfile.open(path, "w", format=kind) as tar:
        for inner, content in ((name, os.urandom(size)), ("b/c.json", b"{}")):
            found = info(inner, len(content))
            found.mtime = mtime
            try:
                tar.addfile(found, io.BytesIO(content))
            except ValueError:  # a name that ustar can't hold
                return
    with tarfile.open(path) as tar:
        expected = [(m.name, m.offset_data, m.size) for m in tar if m.isfile()]
    found = walk(path)
    assert [(m.name, m.start, m.num_bytes) for m in found] == expected


@settings(max_examples=300, deadline=None)
@given(place=st.integers(0, 511), value=st.integers(0, 255), seed=st.integers(0, 5))
def test_a_header_with_any_byte_changed_is_judged_as_tarfile_judges_it(place, value, seed):
    found = info("f/" * (seed * 15) + "x.jpg", 8**seed)
    block = bytearray(found.tobuf(FORMATS[seed % 2])[-512:])
    block[place] = value
    try:
        expected = tarfile.TarInfo.frombuf(bytes(block), "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        expected = None
    got = parse_header(bytes(block))
    assert (got is None) == (expected is None)
    if got is not None:
        assert (got.size, got.type) == (expected.size, expected.type)


def test_sizes_beyond_eight_gigabytes_are_read():
    for kind in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        found = info("a.jpg", 9 << 30)
        block = found.tobuf(kind)[-512:]
        size = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape").size
        assert parse_header(block).size == size


def test_tarfile_stops_at_a_damaged_header_and_the_walk_does_not(tmp_path):
    path = write_tar(tmp_path / "a.tar", tar_members(100))
    everything = by_tarfile(path)
    at = header_of(path, "0048.jpg")
    overwrite(path, at, b"\xff" * 100)
    before = everything.index("0048.jpg")
    assert by_tarfile(path) == everything[:before]  # without a word
    assert names(path) == everything[:before] + everything[before + 1 :]
    lost = damage(path)
    assert [(part.start, part.reason) for part in lost] == [(at, "damaged header")]
    assert lost[0].stop == header_of_next(path, everything[before + 1])


def header_of_next(path, name):
    return next(m.header for m in walk(path) if isinstance(m, Member) and m.name == name)


def test_members_that_were_overwritten_with_zeros_are_reported(tmp_path):
    path = write_tar(tmp_path / "a.tar", tar_members(100))
    first, last = header_of(path, "0048.jpg"), header_of(path, "0056.jpg")
    overwrite(path, first, bytes(last - first))
    assert [(part.start, part.stop) for part in damage(path)] == [(first, last)]
    assert "0047.txt" in names(path)
    assert "0056.jpg" in names(path)


def test_two_archives_in_one_file_are_no_damage(tmp_path):
    for seam in (1024, 0):
        one = write_tar(tmp_path / "1.tar", tar_members(6)).read_bytes()
        two = write_tar(tmp_path / "2.tar", tar_members(6, first=6)).read_bytes()
        one = one.rstrip(b"\0") if seam else one
        one += bytes(-len(one) % 512) + bytes(seam)
        (tmp_path / "both.tar").write_bytes(one + two)
        assert not damage(tmp_path / "both.tar")
        assert len(names(tmp_path / "both.tar")) == len(tar_members(12))


@pytest.mark.parametrize("left", [0, 100, 512, 700])
def test_a_cut_tar_keeps_what_is_whole_and_reports_the_rest(tmp_path, left):
    path = write_tar(tmp_path / "a.tar", tar_members(20))
    at = header_of(path, "0012.jpg")
    path.write_bytes(path.read_bytes()[: at + left])
    assert names(path)[-1] == "0011.txt"
    assert len(damage(path)) == 1
    assert damage(path)[0].reason.startswith("cut short")


def test_links_are_named_and_never_followed_and_holes_are_not_read(tmp_path):
    sparse = bytearray(info("holes.jpg", 512, tarfile.GNUTYPE_SPARSE).tobuf(tarfile.GNU_FORMAT))
    sparse[482] = 1  # its map goes on in another block
    sparse[148:156] = b"%06o\0 " % (sum(sparse) - sum(sparse[148:156]) + 256)
    path = raw_tar(
        tmp_path / "a.tar",
        (info("a.jpg", 0, tarfile.SYMTYPE), b""),
        (info("b.jpg", 4096, tarfile.LNKTYPE), b""),
        (bytes(sparse), bytes(512) + b"x" * 512),
        (info("c.jpg", 3), b"abc"),
        (info("folder", 0, tarfile.DIRTYPE), b""),
        (info("pipe", 0, tarfile.FIFOTYPE), b""),
    )
    found = walk(path)
    assert [(m.name, m.kind) for m in found] == [
        ("a.jpg", LINK), ("b.jpg", LINK), ("holes.jpg", SPARSE), ("c.jpg", FILE)
    ]  # fmt: skip


def pax(records):
    body = b""
    for name, value in records.items():
        text = b" " + name.encode() + b"=" + value + b"\n"
        length = len(text) + len(str(len(text) + len(str(len(text)))))
        body += str(length).encode() + text
    return (info("pax", len(body), tarfile.XHDTYPE), body)


def test_a_record_of_holes_in_front_of_a_member_is_seen(tmp_path):
    path = raw_tar(
        tmp_path / "a.tar",
        pax({"GNU.sparse.major": b"1", "path": b"x.jpg"}),
        (info("short", 3), b"abc"),
    )
    assert [(m.name, m.kind) for m in walk(path)] == [("x.jpg", SPARSE)]


@pytest.mark.parametrize("size", [10**6, 10**12, 10**30])
def test_a_header_that_states_more_than_there_is_costs_no_memory(tmp_path, size):
    path = raw_tar(tmp_path / "a.tar", pax({"size": str(size).encode()}), (info("a.jpg", 0), b""),
                   (info("b.jpg", 3), b"abc"))  # fmt: skip
    found = walk(path)
    assert isinstance(found[0], Damage)
    assert found[0].start == 0


def test_a_record_that_contradicts_the_header_swallows_no_other_member(tmp_path):
    members = [(f"{i}.json", b"x" * 600) for i in range(6)]
    parts = [(info(name, len(content)), content) for name, content in members]
    path = raw_tar(tmp_path / "a.tar", *parts[:2], pax({"size": b"2136"}), *parts[2:])
    assert names(path) == ["0.json", "1.json", "3.json", "4.json", "5.json"]
    assert len(damage(path)) == 1


def test_a_long_header_in_front_costs_its_member_alone(tmp_path):
    long = (info("././@LongLink", 2 << 20, tarfile.GNUTYPE_LONGNAME), b"x" * (2 << 20))
    path = raw_tar(tmp_path / "a.tar", (info("a.jpg", 3), b"abc"), long,
                   (info("x", 3), b"abc"), (info("b.jpg", 3), b"abc"))  # fmt: skip
    assert names(path) == ["a.jpg", "b.jpg"]
    assert "a header of 2097152 bytes" in damage(path)[0].reason


@pytest.mark.parametrize(
    "records",
    [b"99999999999999999999 path=x\n", b"0 path=x\n", b"-4 path=x\n", b"12", b"", b"\xff\xfe"],
)
def test_odd_records_in_front_do_not_hurt(tmp_path, records):
    head = (info("pax", len(records), tarfile.XHDTYPE), records)
    path = raw_tar(tmp_path / "a.tar", head, (info("a.jpg", 3), b"abc"))
    assert names(path) == ["a.jpg"]


def test_what_is_no_plain_tar_is_refused(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w:gz"):
        pass
    with pytest.raises(ConfigError, match=r"compressed with gzip.* Unpack it"):
        Archive(tmp_path / "a.tar")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="must be a regular file"):
        Archive(tmp_path / "pipe")
    with pytest.raises(ShardError, match="can't be read: No such file"):
        Archive(tmp_path / "none.tar")


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_a_window_shows_the_bytes_of_the_file_in_any_order(tmp_path_factory, seed):
    rng = np.random.default_rng(seed)
    data = rng.bytes(5000)
    path = tmp_path_factory.mktemp("w") / "x"
    path.write_bytes(data)
    with path.open("rb") as file:
        window = Window(file.fileno(), capacity=1000)
        for _ in range(20):
            start, count = int(rng.integers(0, 5100)), int(rng.integers(0, 1000))
            assert bytes(window.view(start, count)) == data[start : start + count]
