"""Real DeepSpeed pipelines, two to four gloo processes, against the same training in one process.

Tests named `..._still_...` hold a defect of DeepSpeed: one that fails says that DeepSpeed has
mended it, and that the workaround which its text names can go.
"""

import functools
import math
import shutil

import pytest
import torch
from torch import nn

from tests.deepspeed_launch import launch
from tests.deepspeed_parts import Case, train_alone, write_other_rows, write_rows

pytest.importorskip("deepspeed")
ranks = pytest.importorskip("tests.deepspeed_ranks")
defects = pytest.importorskip("tests.deepspeed_defects")


#: a row with an image that comes in the first steps
DAMAGED = 16


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    # the model is so small that threads only wait for each other
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    shards = write_rows(tmp_path_factory.mktemp("data") / "shards")
    write_other_rows(shards, damaged=DAMAGED)
    return shards


@pytest.fixture(scope="module")
def alone(shards):
    """Training in this process, once for each data-parallel size, accumulation, clipping..."""

    @functools.cache
    def train(case, accumulations):
        return train_alone(shards, case, accumulations=accumulations)

    def of(case, accumulations=()):
        names = ("dp", "accumulation", "frozen", "clip", "data")
        same = {name: getattr(case, name) for name in names}
        return train(Case(parts=(0, 9), steps=4, **same), accumulations)

    return of


@pytest.fixture(scope="module")
def pairs(shards, tmp_path_factory):
    names = (*ranks.PAIRS, *ranks.BF16, "resumed", "moved_optimizer", "other_accumulation",
             "epochs", "refusals", "clip_norm", "frozen_refused", "tied", "specs", "unused_float",
             "crash_unused_float")  # fmt: skip
    folder = tmp_path_factory.mktemp("pairs") / "out"
    return *launch(folder, shards, 2, *names), folder


@pytest.fixture(scope="module")
def triples(shards, pairs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("triples") / "out"
    shutil.copytree(pairs[2] / "saved", folder / "saved")
    names = (*ranks.TRIPLES, "reads", "moved", "mixed_tuple", "crash_mixed_tuple")
    return launch(folder, shards, 3, *names)


@pytest.fixture(scope="module")
def fours(shards, tmp_path_factory):
    names = (*ranks.FOURS, "partitioned", "crash_partitioned")
    return launch(tmp_path_factory.mktemp("fours") / "out", shards, 4, *names)


def assert_same_training(results, reference, name, steps):
    losses, states, _ = reference
    for seen in results:
        assert seen[name]["losses"] == pytest.approx(losses[:steps], abs=1e-5)
        for layer, weights in seen[name]["weights"].items():
            for key, value in weights.items():
                torch.testing.assert_close(
                    value, states[steps - 1][layer][key], rtol=0, atol=1e-5, msg=f"{layer}.{key}"
                )
    layers = {layer for seen in results for layer in seen[name]["weights"]}
    assert layers == set(range(9))


def assert_same_state(results, name):
    states = [seen[name]["state"] for seen in results]
    assert states == [states[0]] * len(states)


def test_the_data_has_packs_of_text_alone(alone):
    *_, tiles = alone(ranks.PAIRS["plain"])
    assert 0 in tiles[:9]
    assert len(set(tiles[:9])) > 4
    *_, tiles = alone(ranks.PAIRS["texts"])
    assert [0] * 3 in [tiles[step : step + 3] for step in (0, 3, 6)]


@pytest.mark.parametrize("name", ranks.PAIRS)
def test_two_stages_train_as_one_process_does(pairs, alone, name):
    case = ranks.PAIRS[name]
    assert_same_training(pairs[0], alone(case), name, case.steps)
    assert_same_state(pairs[0], name)


def test_exactly_what_the_plan_says_is_recomputed(pairs):
    case = ranks.PAIRS["recompute"]
    batches = case.steps * case.accumulation
    counts = {key: n for seen in pairs[0] for key, n in seen["recompute"]["forwards"].items()}
    for layer, choice in enumerate(case.recompute):
        assert counts[layer, ""] == batches * (2 if choice == 1 else 1)
        for part in ("", "attention.qkv", "mlp.0"):
            if (layer, part) in counts:
                again = choice == 1 or choice == part.split(".")[0]
                assert counts[layer, part] == batches * (2 if again else 1), (layer, part)


@pytest.mark.parametrize("name", ranks.BF16)
def test_bfloat16_trains_alike_within_its_eight_bits(pairs, alone, name):
    case = ranks.BF16[name]
    losses, *_ = alone(case)
    for seen in pairs[0]:
        assert seen[name]["losses"] == pytest.approx(losses[: case.steps], rel=2e-2)
        dtypes = {w.dtype for weights in seen[name]["weights"].values() for w in weights.values()}
        assert dtypes == {torch.bfloat16}


@pytest.mark.parametrize("name", ranks.TRIPLES)
def test_three_stages_train_as_one_process_does(triples, alone, name):
    case = ranks.TRIPLES[name]
    assert_same_training(triples[0], alone(case), name, case.steps)
    assert_same_state(triples[0], name)


@pytest.mark.parametrize("name", ranks.FOURS)
def test_four_processes_train_as_one_does(fours, alone, name):
    case = ranks.FOURS[name]
    assert_same_training(fours[0], alone(case), name, case.steps)
    assert_same_state(fours[0], name)


def test_a_frozen_encoder_stays_as_it_is_and_costs_no_backward_pass(triples, alone):
    _, states, _ = alone(ranks.TRIPLES["frozen_middle"])
    for seen in triples[0]:
        for layer, weights in seen["frozen_middle"]["weights"].items():
            same = [torch.equal(weights[key], states[0][layer][key]) for key in weights]
            assert all(same) == (layer < 3)
    # patches and vision blocks are frozen, and begin the stages 0, 1 and 2 at layers 0, 1 and 3:
    # neither they nor the projector get an input that wants a gradient
    for name, cut in (("frozen_middle", range(4)), ("three", range(1))):
        counts = {key: n for seen in triples[0] for key, n in seen[name]["forwards"].items()}
        assert [layer for layer in range(9) if not counts[layer, "graph"]] == list(cut)


def test_training_goes_on_exactly_after_a_saved_state(pairs, alone):
    case = ranks.PLAIN
    assert_same_training(pairs[0], alone(case), "resumed", 4)
    assert [seen["resumed"]["note"] for seen in pairs[0]] == [7, 7]


def test_weights_reload_under_another_partition_and_more_stages(pairs, triples, alone):
    losses, *_ = alone(ranks.PLAIN)
    for seen in pairs[0]:
        assert seen["resumed"]["moved"] == pytest.approx(losses[2], abs=1e-5)
    for seen in triples[0]:
        assert seen["moved"]["loss"] == pytest.approx(losses[2], abs=1e-5)


def test_the_optimizer_moves_to_other_bounds_by_way_of_a_universal_checkpoint(pairs):
    for seen in pairs[0]:
        found = seen["moved_optimizer"]
        assert found["moved"] == pytest.approx(found["losses"][2:], abs=1e-5)
        assert "expected parts=[0, 3, 9], got [0, 5, 9]" in found["refused"]
        assert "deepspeed.checkpoint.ds_to_universal" in found["refused"]


def test_the_micro_batches_of_a_step_may_change_between_steps(pairs, alone):
    reference = alone(ranks.PLAIN, accumulations=(3, 3, 2))
    assert_same_training(pairs[0], reference, "other_accumulation", 3)
    for seen in pairs[0]:
        assert (
            "as many micro-batches in the loader as in the engine: expected 2, got acc"
            in (seen["other_accumulation"]["error"])
        )


def test_steps_go_through_epochs_and_follow_loaded_states(pairs):
    for seen in pairs[0]:
        found = seen["epochs"]
        first = [step for epoch, step in found["seen"] if epoch == 0]
        assert first == list(range(found["per_epoch"]))
        assert [step for epoch, step in found["seen"] if epoch == 1][:3] == [0, 1, 2]
        assert found["again"] == 2
        assert found["went_on"] == 1
        assert found["same"]
        assert math.isfinite(found["evaluated"])


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("world", "expected dp_world_size=1 on rank 0, got 2. Make it with DataLoader(world="),
        ("engine", "what deepspeed.initialize returned for a BalancedPipelineModule"),
        ("loader", "loader must be an omniload.DataLoader, got list"),
        ("tail", "make the loader with tail='filler'"),
        ("inside", "the loader stands behind micro-step 1 of a step"),
        ("layers", "the plan must cover all layers of the model: expected 9, got 8"),
        ("stages", "must be a multiple of the 3 stages of the plan, got 2"),
        ("part", "needs a submodule of layer 0 (Patches) named one of mlp, ffn, feed_forward"),
        ("all_frozen", "a layer of some stage must have a parameter to train"),
        ("loss", "loss must be one of 'token', 'sample', 'sqrt', got 'tokens'"),
        ("plain_loader", "what pipeline_batches(loader, engine) returned, got DataLoader"),
        ("plain_batches", "what pipeline_batches(loader, engine) returned, got BatchIterator"),
        ("interval", "activation_checkpoint_interval must be 0"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_remedy(pairs, name, part):
    assert part in pairs[0][0]["refusals"][name]
    assert pairs[0][1]["refusals"][name]


def test_middle_stages_read_nothing_and_the_last_no_image(triples):
    assert_same_state(triples[0], "reads")
    state = triples[0][1]["reads"]["state"]
    assert (state["epoch"], state["step"]) == (1, 2)
    assert [seen["reads"]["workers"] for seen in triples[0]] == [True, False, True]
    first, middle, last = (seen["reads"]["bytes"] for seen in triples[0])
    assert middle == 0
    assert 0 < last < first / 2


def test_tied_layers_train_as_one_module(pairs):
    start = pairs[0][0]["tied"]
    shared, middle = nn.Linear(4, 4), nn.Linear(4, 4)
    shared.load_state_dict({name.split(".")[1]: value for name, value in start["tied"].items()})
    middle.load_state_dict(start["middle"])
    model = nn.Sequential(shared, middle, shared)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches, losses = defects.data(defects.Plain), []
    for _ in range(2):
        total = 0.0
        for _ in defects.ROWS:
            inputs, labels = next(batches)
            loss = defects.loss_fn(model(inputs[0]), labels) / 3
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    for seen in pairs[0]:
        assert seen["tied"]["losses"] == pytest.approx(losses, abs=1e-4)
        torch.testing.assert_close(seen["tied"]["after"]["main.weight"], shared.weight.data)
        torch.testing.assert_close(seen["tied"]["after"]["main.bias"], shared.bias.data)
        assert "'main' has ['bias'] beside ['weight']" in seen["tied"]["refused"]


def test_layers_made_on_their_stage_are_the_same_under_any_bounds(pairs):
    for seen in pairs[0]:
        first, second = seen["specs"]["losses"]
        assert first == pytest.approx(second, rel=1e-6)
        assert first[0] != first[1]


# -- defects of DeepSpeed ------------------------------------------------------------------------


def test_deepspeed_still_fails_on_a_float_without_gradient_and_the_adapter_does_not(pairs):
    results = pairs[0]
    reference = defects.train_alone(defects.Unused, 3)
    for seen in results:
        assert seen["unused_float"]["losses"] == pytest.approx(reference, rel=1e-5)
    # mended in _give_graph_to_outputs and _give_gradient_to_inputs
    assert "assert buffer.grad is not None" in results[1]["crash_unused_float"]["error"]


def test_deepspeed_still_mixes_buffers_of_floats_and_integers_and_the_adapter_does_not(triples):
    results, stderr = triples
    reference = defects.train_alone(defects.Layer, 5)
    for seen in results:
        assert seen["mixed_tuple"]["losses"] == pytest.approx(reference, rel=1e-5)
    # mended in _mended, by pools of their own
    errors = [seen.get("crash_mixed_tuple", {}).get("error", "aborted") for seen in results]
    assert all(errors)
    assert "size doesn't match" in stderr or "size" in "".join(errors)


def test_deepspeed_still_keeps_shapes_with_tensor_parallelism_and_the_adapter_does_not(fours):
    results, _ = fours
    reference = defects.train_alone(defects.Plain, 3)
    for seen in results:
        assert seen["partitioned"]["losses"] == pytest.approx(reference, rel=1e-5)
    # mended in _mended, by forgetting what is remembered
    assert all(seen.get("crash_partitioned", {}).get("error", "aborted") for seen in results)


def test_deepspeed_still_clips_by_the_norm_of_the_first_stage_and_the_adapter_does_not(pairs):
    for seen in pairs[0]:
        found = seen["clip_norm"]
        assert found["marked"] == pytest.approx(found["squared"] ** 0.5)
        # mended in BalancedPipelineModule._mark_parameters
        assert found["plain"] == pytest.approx((found["squared"] / 3) ** 0.5)


def test_deepspeed_still_refuses_a_stage_of_frozen_layers_and_the_adapter_does_not(pairs):
    for seen in pairs[0]:
        # mended by BalancedPipelineModule.anchor: the case "frozen" trains
        assert seen["frozen_refused"]["error"] == "optimizer got an empty parameter list"
