"""What preprocess tells people: before it begins, at its end, and when it can't go on."""

import gzip
import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from typer.testing import CliRunner

from omniload.errors import ConfigError, SampleError
from omniload.tools.cli import app
from omniload.tools.preprocess_run import preprocess_data
from omniload.tools.recipe import Recipe, RunOptions
from omniload.transforms.text import ConversationEncoder, load_template, load_tokenizer
from omniload.types import Message
from tests.data_makers import image_bytes, llava_set, turns, write_json, write_jsonl

SMALL = Recipe(tile_size=28, max_tiles=4, tokens_per_tile=4)
TILES = ("--tile-size", "28", "--max-tiles", "4", "--tokens-per-tile", "4", "--workers", "1")


def run(src, out, recipe=SMALL, **settings):
    notes = []
    summary = preprocess_data(src, out, recipe=recipe, note=notes.append, **settings)
    return summary, notes


def talk(folder, records=3):
    rows = [{"id": i, "conversations": turns("q", "a")} for i in range(records)]
    return write_jsonl(folder / "x.jsonl", rows)


# --- meta files ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "recipe", "match"),
    [
        (
            {"max_dynamic_patch": 2, "min_dynamic_patch": 3},
            SMALL,
            r"\(max_dynamic_patch 2, min_dynamic_patch 3\) that don't go with .* between 3 and",
        ),
        ({"min_dynamic_patch": 5}, SMALL, r"\(min_dynamic_patch 5\) that don't go with .*, got 4"),
        ({"max_dynamic_patch": 6}, Recipe(tiling="qwen"), "remove max_dynamic_patch"),
        ({"max_dynamic_patch": "6"}, SMALL, "must be an integer of at least 1, got '6'"),
    ],
)
def test_limits_of_a_set_are_never_ignored(tmp_path, entry, recipe, match):
    talk(tmp_path)
    src = write_json(tmp_path / "meta.json", {"s": {"annotation": "x.jsonl", **entry}})
    with pytest.raises(ConfigError, match=match):
        run(src, tmp_path / "out", recipe)


def test_keys_of_a_meta_file_that_are_not_used_are_noted(tmp_path):
    talk(tmp_path)
    entry = {"annotation": "x.jsonl", "max_dynamic_patch": 4, "data_augment": True, "length": 3}
    src = write_json(tmp_path / "meta.json", {"s": {**entry, "repeat_time": 1, "extra": False}})
    _, notes = run(src, tmp_path / "out")
    assert "set 's' of the meta file has 'data_augment', which is not used" in notes
    assert not any("length" in note or "extra" in note for note in notes)


# --- tokenizers ------------------------------------------------------------------------------


def test_added_tokens_are_told_at_the_start_and_in_the_summary(tmp_path):
    summary, notes = run(talk(tmp_path), tmp_path / "out")
    size = summary.as_dict()["vocab_size"]
    added = len(summary.as_dict()["added_tokens"])
    assert any(
        note.startswith(f"{added} tokens added") and f"at least {size} rows" in note
        for note in notes
    )
    done = CliRunner().invoke(app, ["preprocess", str(tmp_path / "x.jsonl"), str(tmp_path / "o")])
    assert f"vocabulary  {added} tokens added" in done.stdout


def test_a_tokenizer_that_loses_text_is_told_once_with_an_example(tmp_path):
    words = {word: i for i, word in enumerate(("[UNK]", "q", "a"))}
    tokenizer = Tokenizer(models.WordLevel(vocab=words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    (tmp_path / "tok.json").write_text(tokenizer.to_str())
    recipe = Recipe(tokenizer=str(tmp_path / "tok.json"), tile_size=28, tokens_per_tile=4)
    _, notes = run(talk(tmp_path), tmp_path / "out", recipe)
    assert not [note for note in notes if "loses text" in note]
    rows = [{"id": i, "conversations": turns("q", "a naïve ß")} for i in range(5)]
    _, notes = run(write_jsonl(tmp_path / "y.jsonl", rows), tmp_path / "out2", recipe)
    (lost,) = [note for note in notes if "loses text" in note]
    assert "ß" in lost


# --- answers ---------------------------------------------------------------------------------


def encoded(*answers, loss="assistant"):
    encoder = ConversationEncoder(
        tokenizer=load_tokenizer(), template=load_template("chatml"), loss=loss
    )
    messages = []
    for answer in answers:
        messages += [Message(role="user", content="q"), Message(role="assistant", content=answer)]
    result = encoder.encode(messages, [])
    return bytes(int(t) for t in result.labels if 0 <= t < 256).decode()


@pytest.mark.parametrize("loss", ["assistant", "last"])
def test_an_answer_without_text_gives_no_loss(loss):
    with pytest.raises(SampleError, match="empty answer"):
        encoded(" \n", loss=loss)
    assert encoded("", "Yes", loss=loss) == "Yes"


def test_an_empty_last_answer_leaves_nothing_to_train_the_last_turn_on():
    assert encoded("Yes", "") == "Yes"
    with pytest.raises(SampleError, match="empty answer"):
        encoded("Yes", "", loss="last")


def test_empty_answers_are_counted_under_their_own_name(tmp_path):
    rows = [{"conversations": turns("q", "")}, {"conversations": turns("q", "a")}]
    summary, _ = run(write_jsonl(tmp_path / "a.jsonl", rows), tmp_path / "out")
    assert summary.reasons == {"empty answer": 1}


# --- images ----------------------------------------------------------------------------------


def test_missing_images_point_to_the_image_root(tmp_path):
    (tmp_path / "good.jpg").write_bytes(image_bytes())
    rows = [{"id": i, "image": f"{i}.jpg", "caption": "x"} for i in range(3)]
    src = write_jsonl(tmp_path / "a.jsonl", [*rows, {"image": "good.jpg", "caption": "x"}])
    done = CliRunner().invoke(app, ["preprocess", str(src), str(tmp_path / "out"), *TILES])
    assert done.exit_code == 0, done.output
    assert "3 samples rejected because an image file is missing" in done.output
    assert "set --image-root" in done.output
    lines = (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()
    reason = json.loads(lines[0])["reason"]
    assert f"No such file or directory in {tmp_path}; see --image-root" in reason
    src = write_jsonl(tmp_path / "b.jsonl", rows)
    with pytest.raises(ConfigError, match=r"all 3 records .* 3 image is missing.*set --image-root"):
        run(src, tmp_path / "out2")


# --- kinds of input --------------------------------------------------------------------------


def test_a_format_goes_before_the_content(tmp_path):
    src = llava_set(tmp_path / "raw", 3)
    with pytest.raises(ConfigError, match=r"not what --format parquet says: .* a JSON array"):
        run(src, tmp_path / "out", format_name="parquet")
    noise = tmp_path / "noise.bin"
    noise.write_bytes(b"\x07" * 2000)
    with pytest.raises(ConfigError, match="can't be read as Parquet"):
        run(noise, tmp_path / "out", format_name="parquet")
    with pytest.raises(ConfigError, match="is not a tar"):
        run(noise, tmp_path / "out", format_name="webdataset")


def test_text_named_tar_and_packed_json_are_named_for_what_they_are(tmp_path):
    text = tmp_path / "a.tar"
    text.write_text("no tar at all\n" * 200)
    with pytest.raises(ConfigError, match=r"a\.tar is not a tar"):
        run(text, tmp_path / "out")
    packed = tmp_path / "a.json.gz"
    packed.write_bytes(gzip.compress(b"[]"))
    with pytest.raises(ConfigError, match=r"a\.json\.gz is compressed\. Unpack it"):
        run(packed, tmp_path / "out")


# --- words -----------------------------------------------------------------------------------


def test_settings_are_named_as_options(tmp_path):
    with pytest.raises(ConfigError, match="--max-tiles must"):
        Recipe(max_tiles=0).policy()
    with pytest.raises(ConfigError, match="--tokens-per-tile must"):
        Recipe(tokens_per_tile=0).settings()
    rows = [{"image": "a.jpg", "conversations": turns("q<image>", "a" * 400)}]
    (tmp_path / "a.jpg").write_bytes(image_bytes())
    recipe = Recipe(tile_size=28, max_tiles=4, tokens_per_tile=4, max_tokens=8)
    with pytest.raises(ConfigError, match="Try --oversize fewer-tiles"):
        run(write_jsonl(tmp_path / "a.jsonl", rows), tmp_path / "out", recipe)
    with pytest.raises(ConfigError, match="--shard-bytes must"):
        RunOptions(shard_bytes=1)


def test_one_is_singular_and_help_fits_a_terminal(tmp_path):
    done = CliRunner().invoke(app, ["preprocess", str(talk(tmp_path)), str(tmp_path / "o"), *TILES])
    assert ": 1 shard, " in done.stdout
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path / "o")])
    assert "3 rows in 1 shard, " in shown.stdout
    shown = CliRunner().invoke(app, ["preprocess", "--help"], env={"COLUMNS": "80"})
    assert "--allow-outside-root" in shown.stdout
