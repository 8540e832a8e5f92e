"""With uniform_modality=True the ranks of a micro-step all have images, or none has."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload import Budget, ConfigError, DataLoader, StateError, World
from omniload.packing import pack
from omniload.padding import Padding
from omniload.shards import open_shards
from omniload.transforms import transform_from_settings
from tests.loader_data import Wrapped, assert_same_run, rows_of, write_data

BUDGET = Budget(tokens=500, tiles=12)
NUM_ROWS = 60


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Two rows of text for each one with images, so that many groups have no image."""
    folder = tmp_path_factory.mktemp("uniform") / "shards"
    return open_shards(write_data(folder, num_rows=NUM_ROWS, num_images=(0, 1, 0, 0, 2, 0)))


@pytest.fixture(scope="module")
def filler(data):
    return transform_from_settings(data.manifest.settings).filler(with_image=True)


def run(data, size, **arguments):
    """The batches of all ranks over an epoch, micro-step by micro-step."""
    arguments = {"budget": BUDGET, "accumulation": 2, "uniform_modality": True, **arguments}
    ranks = [
        list(DataLoader(data, world=World(dp_rank=rank, dp_world_size=size), **arguments))
        for rank in range(size)
    ]
    return list(zip(*ranks, strict=True))


def dummies(batch):
    return 0 if batch.is_filler else batch.num_samples - len(batch.sample_ids)


def has_images(batches):
    return {batch.num_tiles > 0 for batch in batches}


@settings(deadline=None, max_examples=12)
@given(
    size=st.integers(2, 4),
    accumulation=st.integers(1, 3),
    sync=st.sampled_from(["step", "micro-step", None]),
    shuffle=st.booleans(),
    grouping=st.sampled_from(["buffered", "random"]),
    seed=st.integers(0, 1000),
)
def test_every_micro_step_has_images_on_all_ranks_or_on_none(
    data, filler, size, accumulation, sync, shuffle, grouping, seed
):
    micro_steps = run(
        data, size, accumulation=accumulation, sync=sync, shuffle=shuffle, grouping=grouping,
        seed=seed,
    )  # fmt: skip
    batches = [batch for slot in micro_steps for batch in slot]
    assert all(len(has_images(slot)) == 1 for slot in micro_steps)
    assert sorted(rows_of(batches)) == list(range(NUM_ROWS))
    for batch in batches:
        assert batch.num_tokens <= BUDGET.tokens
        assert batch.num_tiles <= BUDGET.tiles
        rows = batch.sample_ids.numpy()
        assert batch.num_loss_tokens == data.index.num_loss_tokens[rows].sum()
        own = data.index.num_tokens[rows].sum() + dummies(batch) * filler.num_tokens
        assert batch.is_filler or batch.num_tokens == own


def test_without_it_ranks_differ(data):
    micro_steps = run(data, 3, uniform_modality=False)
    assert any(len(has_images(slot)) == 2 for slot in micro_steps)
    assert not any(dummies(batch) for slot in micro_steps for batch in slot)


def test_swaps_leave_few_dummies(data):
    count = {
        sync: sum(dummies(batch) for slot in run(data, 3, sync=sync) for batch in slot)
        for sync in (None, "step", "micro-step")
    }
    assert count[None] > 3
    assert count["step"] <= count[None] / 2
    assert count["micro-step"] <= count[None] / 2


def test_dummy_is_a_document_of_its_own_that_gives_no_loss(data, filler):
    found = [batch for slot in run(data, 3, sync=None) for batch in slot if dummies(batch)]
    for batch in found:
        start, end = batch.cu_seqlens[-2:].tolist()
        assert (start, end) == (batch.num_tokens - filler.num_tokens, batch.num_tokens)
        assert batch.input_ids[start:].tolist() == filler.input_ids.tolist()
        assert (batch.labels[start:] == -100).all()
        assert batch.position_ids[start:].tolist() == list(range(end - start))
        assert batch.image_spans.tolist() == (filler.image_spans + start).tolist()
        assert batch.tiles.shape == filler.tiles.shape
        assert not batch.tiles.any()
        assert not batch.loss_weights("sample")[start:].any()
        assert [sample.sample_id for sample in batch.unpack()] == [*batch.sample_ids, -1]
        assert batch.loss_scale() > 0


@pytest.mark.parametrize(
    "padding",
    [
        {"pad_to": "full"},
        {"pad_to": Padding(document_multiple=4)},
        {"pad_to": Padding(num_documents=6), "budget": Budget(tokens=500, tiles=12, samples=4)},
    ],
)
def test_padded_rows_have_room_for_the_dummy(data, padding):
    micro_steps = run(data, 3, sync=None, **padding)
    assert all(len(has_images(slot)) == 1 for slot in micro_steps)
    assert any(dummies(batch) for slot in micro_steps for batch in slot)
    assert all(batch.num_tokens <= 500 for slot in micro_steps for batch in slot)


def test_documents_of_padding_and_dummy_both_count(data):
    budget = Budget(tokens=500, tiles=12, samples=5)
    with pytest.raises(ConfigError, match=r"Budget\.samples must be at most 4"):
        run(data, 1, budget=budget, pad_to=Padding(num_documents=6))


def test_text_that_leaves_no_room_is_over_the_budget(data, filler):
    longest = int(data.index.num_tokens[data.index.num_tiles == 0].max())
    tokens = max(longest, int(data.index.num_tokens.max()))
    budget = Budget(tokens=longest + filler.num_tokens - 1)
    if budget.tokens < tokens:
        pytest.skip("rows with images are longer")
    with pytest.raises(ConfigError, match=f"a dummy image needs {filler.num_tokens} tokens"):
        run(data, 2, budget=budget)
    left = run(data, 2, budget=budget, oversize="drop")
    rows = rows_of(batch for slot in left for batch in slot)
    assert 0 < NUM_ROWS - len(rows) == (data.index.num_tokens[data.index.num_tiles == 0] == longest
                                        ).sum()  # fmt: skip
    run(data, 2, budget=Budget(tokens=longest + filler.num_tokens))


def test_data_without_images_needs_no_room(tmp_path):
    text = open_shards(write_data(tmp_path / "text", num_rows=6, num_images=(0,)))
    longest = int(text.index.num_tokens.max())
    micro_steps = run(text, 2, budget=Budget(tokens=longest))
    assert not any(batch.num_tiles for slot in micro_steps for batch in slot)


def test_resume_is_exact_and_a_toggle_is_refused(data):
    arguments = {
        "budget": BUDGET,
        "accumulation": 3,
        "world": World(dp_rank=1, dp_world_size=2),
        "uniform_modality": True,
    }
    loading = DataLoader(data, **arguments)
    batches, states = [], [loading.state_dict()]
    for batch in loading:
        batches.append(batch)
        states.append(loading.state_dict())
    for done in range(0, len(batches), 2):
        resumed = DataLoader(data, **arguments)
        resumed.load_state_dict(states[done])
        assert_same_run(resumed, batches[done:])
    plain = DataLoader(data, **{**arguments, "uniform_modality": False})
    with pytest.raises(StateError, match=r"order: 'buffered/\d+ with room for \d+ tokens' in the"):
        plain.load_state_dict(states[3])


def test_batches_with_dummies_cross_from_workers(data):
    plain, crossed = (
        [batch for slot in run(data, 2, sync=None, num_workers=workers) for batch in slot]
        for workers in (0, 1)
    )
    assert_same_run(plain, crossed)


class NoImage(Wrapped):
    fingerprint = "no-image/1"

    def filler(self, with_image):
        return self.inner.filler(False)


def test_filler_without_an_image_is_refused(data):
    transform = NoImage(transform_from_settings(data.manifest.settings))
    with pytest.raises(
        ConfigError, match="must have a tile, because the data has images, got 0 tiles"
    ):
        run(data, 2, transform=transform)


def test_dummy_that_is_none_is_refused(data, filler):
    sample = transform_from_settings(data.manifest.settings)(data.read(0), np.random.default_rng(0))
    with pytest.raises(ConfigError, match="a dummy document must have sample_id=-1"):
        pack([sample], dummy=sample)
    batch = pack([sample], dummy=filler)
    assert torch.equal(batch.input_ids[: sample.num_tokens], torch.tensor(sample.input_ids))
    assert batch.sample_ids.tolist() == [0]


def test_budget_that_a_dummy_passes_is_refused(data, filler):
    for wrong in (Budget(tokens=filler.num_tokens), Budget(tokens=500, tiles=0)):
        with pytest.raises(ConfigError, match=r"uniform_modality=True appends|filler"):
            run(data, 2, budget=wrong)
