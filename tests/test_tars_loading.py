"""Indexed tars under the loader, and tars without an index as a stream."""

import logging
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import omniload
from omniload.errors import ConfigError, SampleError
from omniload.images import InternVLTiles
from omniload.stream import StreamLoader
from omniload.tars import SampleMaker, open_tars, stream_tars
from omniload.tools.cli import app
from omniload.tools.preprocess_run import preprocess_data
from omniload.tools.recipe import RunOptions, make_encoder
from omniload.transforms import transform_from_settings
from omniload.types import Budget
from omniload.world import World
from tests.data_makers import image_bytes, write_tar
from tests.loader_data import assert_same_run
from tests.tar_makers import RECIPE, header_of, indexed, overwrite, tar_folder

BUDGET = Budget(tokens=800, tiles=16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return indexed(tmp_path_factory.mktemp("tars"), (20, 12))


def loader_of(source, **options):
    return omniload.DataLoader(source, budget=BUDGET, world=World(), **options)


def test_the_loader_gives_the_batches_that_shards_of_the_same_rows_give(folder, tmp_path):
    preprocess_data(
        folder, tmp_path / "shards", recipe=RECIPE, options=RunOptions(keep_order=True),
        format_name="webdataset",
    )  # fmt: skip
    expected = list(loader_of(tmp_path / "shards"))
    assert_same_run(loader_of(folder), expected)
    assert_same_run(loader_of(open_tars(folder), num_workers=2), expected)


def test_a_run_over_tars_is_resumed_exactly(folder):
    whole = list(loader_of(folder))
    first = loader_of(folder)
    batches = iter(first)
    for _ in range(3):
        next(batches)
    second = loader_of(folder)
    second.load_state_dict(first.state_dict())
    assert_same_run(second, whole[3:])


def test_plans_of_tars_are_shown(folder):
    done = CliRunner().invoke(app, ["plan", str(folder), "--ranks", "2", "--budget-tokens", "800"])
    assert done.exit_code == 0, done.output
    assert str(folder) in "".join(done.stdout.split())  # a long path may be cut into lines


def test_opening_an_index_loads_no_tokenizer(folder):
    code = (
        "import sys; from omniload.tars import open_tars\n"
        f"tars = open_tars({str(folder)!r}); print(len(tars), 'tokenizers' in sys.modules)"
    )
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root
    )
    assert done.stdout.split() == ["32", "False"]


# --- streams -----------------------------------------------------------------------------------


def a_maker():
    return SampleMaker(
        encoder=make_encoder(RECIPE), policy=InternVLTiles(size=28, max_tiles=4, thumbnail=True)
    )


def stream_loader(stream, **options):
    transform = transform_from_settings(a_maker().settings())
    return StreamLoader(
        stream, budget=BUDGET, transform=transform, world=World(), buffer=8, **options
    )


def ids(batches):
    return [number for batch in batches for number in batch.sample_ids.tolist()]


def test_tars_without_an_index_are_a_stream_of_the_same_rows(folder):
    paths = sorted(folder.glob("*.tar"))
    stream = pickle.loads(pickle.dumps(stream_tars(paths, maker=a_maker())))
    tars = open_tars(folder)
    from omniload.stream import StreamPart

    for number, record in enumerate(stream(StreamPart())):
        expected = tars.read(number)
        assert (record.key, record.images) == (expected.key, expected.images)
        assert record.input_ids.tolist() == expected.input_ids.tolist()
    assert number == 31
    found = ids(stream_loader(stream, num_workers=2))
    assert len(found) == len(set(found)) == 32


def test_a_stream_passes_damage_over_with_a_warning(tmp_path, caplog):
    path = tar_folder(tmp_path, (40,)) / "00000.tar"
    at = header_of(path, "0008.jpg")
    overwrite(path, at, b"\xff" * 100)
    with pytest.raises(SampleError, match=r"marks and images|expected 1 mark|tar=.*key='0008'"):
        list(stream_loader(stream_tars([path], maker=a_maker())))
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        loader = stream_loader(stream_tars([path], maker=a_maker(), on_bad_sample="skip"))
        assert len(ids(loader)) == 39
    assert [f"bytes {at} to" in text for text in caplog.messages] == [True, False]
    assert "key='0008'" in caplog.messages[1]


def test_a_caption_without_its_image_is_refused_in_a_stream_too(tmp_path):
    write_tar(tmp_path / "a.tar", [("1.txt", b"A"), ("2.jpg", image_bytes()), ("2.txt", b"B")])
    stream = stream_tars([tmp_path / "a.tar"], maker=a_maker())
    with pytest.raises(SampleError, match="a caption must have an image"):
        list(stream_loader(stream))


def test_wrong_arguments_of_a_stream_are_refused():
    with pytest.raises(ConfigError, match="at least one tar"):
        stream_tars([], maker=a_maker())
    with pytest.raises(ConfigError, match="on_bad_sample must be"):
        stream_tars(["a.tar"], maker=a_maker(), on_bad_sample="x")
