"""What `pack_for` calls safe is safe: real models of transformers, tiny, with random weights."""

import logging
import warnings

import numpy as np
import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from examples.tiny_vlm import TinyVLM
from omniload.errors import ConfigError
from omniload.isolation import check_isolation
from omniload.model_check import pack_for
from omniload.packing import pack
from omniload.padding import Padding
from tests.packing_samples import IMAGE_TOKEN, VOCAB, make_sample

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers are not ours

SAMPLES = [make_sample(index, text=length) for index, length in enumerate((9, 5, 12))]
TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
SAFE = [
    ("llama", "sdpa", {}),
    ("llama", "eager", {}),
    ("llama", "flex_attention", {}),
    ("qwen2", "sdpa", {}),
    ("mistral", "sdpa", {"sliding_window": 4}),
    ("gemma3_text", "sdpa", {"sliding_window": 4}),
    ("mixtral", "sdpa", {"num_local_experts": 2}),
    ("gpt2", "sdpa", {}),
    ("modernbert-decoder", "sdpa", {}),  # its head is called decoder
]
CONV = {"layer_types": ["conv", "full_attention"]}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 1,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
UNSAFE = [
    ("lfm2", CONV, "'conv' carries state"),
    ("mamba", {}, "carries state"),
    ("qwen3_next", LINEAR, "'linear_attention' carries state"),
    ("opt", {}, "doesn't make its mask from position_ids"),
    ("gpt_oss", {"attn_implementation": "eager"}, "doesn't make its mask from position_ids"),
    ("bloom", {}, "takes no position_ids"),
]


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.compiler.set_stance("force_eager"):  # flex_attention compiles for half a minute
        yield
    torch.set_num_threads(threads)


def make_model(name, attn_implementation="sdpa", **settings):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **{**TINY, **settings})
    options = {} if name in ("mamba", "bloom") else {"attn_implementation": attn_implementation}
    model = transformers.AutoModelForCausalLM.from_config(config, **options).float()
    for weight in model.parameters():
        if weight.ndim > 1:  # far enough from 0 for every leak to show
            nn.init.normal_(weight, std=0.2)
    return model.eval()


def logits_alone(model, sample):
    ids = torch.from_numpy(sample.input_ids).long()[None]
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits[0]


# -- safe -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "attention", "settings"), SAFE)
@pytest.mark.parametrize("way", ["attention", "model_inputs"])
def test_safe_models_give_packed_what_they_give_alone(name, attention, settings, way):
    model = make_model(name, attention, **settings)
    report = pack_for(model)
    assert (report.safe, report.backend, report.position_rows) == (True, "transformers", 1)
    assert attention in report.reason
    batch = pack(SAMPLES, pad_to=Padding(multiple=16))
    if way == "attention":
        given = {"input_ids": batch.input_ids[None], **batch.attention(report.backend)}
    else:
        given = batch.model_inputs()
        del given["pixel_values"], given["labels"], given["num_items_in_batch"]
    with torch.no_grad():
        packed = batch.split(model(**given).logits[0])
    for found, sample in zip(packed, SAMPLES, strict=True):
        torch.testing.assert_close(found, logits_alone(model, sample), rtol=1e-4, atol=1e-5)


def test_the_loss_of_a_safe_model_is_that_of_its_samples_alone():
    model = make_model("llama")
    batch = pack(SAMPLES)
    inputs = batch.model_inputs()
    del inputs["pixel_values"]
    loss = model(**inputs).loss * batch.loss_scale("step")
    total = 0.0
    for sample in SAMPLES:
        alone = pack([sample]).model_inputs()
        del alone["pixel_values"], alone["num_items_in_batch"]
        total += float(model(**alone).loss) * sample.num_loss_tokens
    assert float(loss) == pytest.approx(total / batch.num_loss_tokens, rel=1e-5)


@pytest.mark.parametrize(("name", "attention", "settings"), SAFE)
def test_safe_models_pass_the_isolation_check(name, attention, settings):
    report = check_isolation(make_model(name, attention, **settings), pack(SAMPLES, pad_to=16))
    assert report.isolated
    assert report.leaks == ()
    assert report.noise == 0


def test_mrope_needs_text_positions_as_a_fourth_row():
    text = {**TINY, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}}
    text["rope_parameters"]["rope_theta"] = 10_000.0
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 32}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    torch.manual_seed(0)
    model = transformers.Qwen2_5_VLForConditionalGeneration(config).float().eval()
    report = pack_for(model)
    assert (report.safe, report.position_rows) == (True, 4)
    assert "4 rows" in report.reason
    batch = pack(SAMPLES)
    positions = batch.position_ids.expand(3, -1)
    given = batch.attention("transformers", mrope_position_ids=positions)
    with torch.no_grad():
        packed = batch.split(model(input_ids=batch.input_ids[None], **given).logits[0])
    for found, sample in zip(packed, SAMPLES, strict=True):
        torch.testing.assert_close(found, logits_alone(model, sample), rtol=1e-4, atol=1e-5)
    assert check_isolation(model, batch).isolated


# -- unsafe ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "settings", "reason"), UNSAFE)
def test_models_that_mix_samples_are_called_unsafe(name, settings, reason, caplog):
    model = make_model(name, **settings)
    with caplog.at_level(logging.WARNING, logger="omniload.model_check"):
        report = pack_for(model)
    assert (report.safe, report.backend) == (False, "padded")
    assert reason in report.reason
    assert report.reason in caplog.text
    batch = pack(SAMPLES)

    def forward(batch):  # as packed rows would be given to it
        given = {"input_ids": batch.input_ids[None], "use_cache": False}
        if name not in ("mamba", "bloom"):
            given["position_ids"] = batch.position_ids[None]
        return model(**given).logits

    found = check_isolation(model, batch, forward=forward)
    assert not found.isolated
    # causal: a later sample never moves an earlier one
    assert found.leaks
    assert all(changed < moved for changed, moved, _ in found.leaks)


@pytest.mark.parametrize(("name", "settings", "reason"), UNSAFE[:3])
def test_padded_rows_are_safe_for_them(name, settings, reason):
    model = make_model(name, **settings)
    batch = pack(SAMPLES)
    rows = batch.padded()
    given = {"input_ids": rows["input_ids"], "attention_mask": rows["attention_mask"]}
    with torch.no_grad():
        logits = model(**given, use_cache=False).logits
    for row, length, sample in zip(logits, batch.sample_lengths, SAMPLES, strict=True):
        torch.testing.assert_close(row[:length], logits_alone(model, sample), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("extra", [{"use_cache": True}, {"attention_mask": torch.ones(1, 26)}])
def test_a_cache_or_a_mask_of_ones_mixes_samples_of_a_safe_model(extra):
    model, batch = make_model("llama"), pack(SAMPLES)
    assert pack_for(model).safe
    assert "use_cache=False" in pack_for(model).reason
    assert "attention_mask" in pack_for(model).reason

    def forward(batch):
        given = {**batch.attention("transformers"), **extra}
        return model(input_ids=batch.input_ids[None], **given).logits

    assert not check_isolation(model, batch, forward=forward).isolated


def test_flash_attention_is_safe_by_its_offsets():
    model = make_model("llama")
    model.config._attn_implementation = "flash_attention_2"  # which only a GPU can run
    report = pack_for(model)
    assert report.safe
    assert "cu_seq_lens_q" in report.reason
    model.config._attn_implementation = "my_attention"
    assert "'my_attention'" in pack_for(model).reason


def make_internvl():
    text = {"model_type": "qwen2", **TINY}
    vision = {**VISION, "image_size": [28, 28], "patch_size": [14, 14]}
    config = transformers.InternVLConfig(
        text_config=text, vision_config=vision, image_token_id=IMAGE_TOKEN, downsample_ratio=0.5
    )
    torch.manual_seed(0)
    model = transformers.InternVLForConditionalGeneration(config).float().eval()
    for weight in model.parameters():
        if weight.ndim > 1:
            nn.init.normal_(weight, std=0.2)
    return model


def test_a_vision_language_model_gives_packed_what_it_gives_alone_with_images():
    model = make_internvl()
    assert pack_for(model).safe
    samples = [
        make_sample(0, text=9, tiles_per_image=(2, 1), tokens_per_tile=1),
        make_sample(1, text=5),
        make_sample(2, text=7, tiles_per_image=(3,), tokens_per_tile=1),
    ]
    batch = pack(samples, pad_to=16)

    def logits(batch):
        given = batch.model_inputs()
        del given["labels"], given["num_items_in_batch"]
        return model(**{name: value for name, value in given.items() if value is not None}).logits

    with torch.no_grad():
        packed = batch.split(logits(batch)[0])
        alone = [logits(pack([sample]))[0] for sample in samples]
    for found, expected in zip(packed, alone, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert check_isolation(model, batch).isolated


def test_cross_attention_to_images_is_unsafe():
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "attention_heads": 2, "image_size": 28}
    vision |= {"patch_size": 14, "num_global_layers": 1, "intermediate_layers_indices": [0]}
    config = transformers.MllamaConfig(
        text_config={**TINY, "cross_attention_layers": [1]}, vision_config=vision
    )
    model = transformers.MllamaForConditionalGeneration(config)
    assert "cross attention sees the images" in pack_for(model).reason


def test_chunked_layers_and_images_that_see_themselves_are_unsafe():
    chunked = make_model("llama4_text", attention_chunk_size=4, num_local_experts=2)
    assert "other tokens in a packed row" in pack_for(chunked).reason
    config = transformers.Gemma3Config(text_config=TINY, vision_config=VISION)
    model = transformers.Gemma3ForConditionalGeneration(config)
    assert "images see themselves both ways" in pack_for(model).reason


# -- any model ------------------------------------------------------------------------------------


def test_a_model_of_your_own_is_unknown_but_can_be_tried():
    torch.manual_seed(0)
    model = TinyVLM(vocab_size=VOCAB, image_token_id=IMAGE_TOKEN, width=16, num_heads=2).train()
    assert "no config" in pack_for(model).reason
    samples = [*SAMPLES, make_sample(7, text=6, tiles_per_image=(2,))]
    report = check_isolation(model, pack(samples), tolerance=0.0)
    assert report.isolated
    assert model.training


def test_transformers_names_its_flash_attention_arguments_as_we_do():
    utils = pytest.importorskip("transformers.modeling_flash_attention_utils")
    named = set(utils.FlashAttentionKwargs.__annotations__)
    assert {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"} <= named
    assert named & set(pack(SAMPLES).attention("transformers")) >= {"cu_seq_lens_q", "max_length_k"}


def test_wrappers_are_looked_through():
    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    class Adapted(nn.Module):  # as PEFT's models
        def __init__(self, base):
            super().__init__()
            self.base = base

        def get_base_model(self):
            return self.base

    model = make_model("llama")
    assert pack_for(Wrapper(Wrapper(model))).safe
    assert pack_for(torch.compile(Wrapper(Adapted(torch.compile(model))))).safe
    model.model = torch.compile(model.model)
    assert pack_for(model).safe
    assert not pack_for(torch.compile(make_model("bloom"))).safe


def test_shards_of_a_model_are_looked_through():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for name, safe in (("llama", True), ("bloom", False)):
            model = make_model(name)
            report = pack_for(fully_shard(model, mesh=init_device_mesh("cpu", (1,))))
            assert type(model).__name__.startswith("FSDP")
            assert report.safe is safe
    finally:
        dist.destroy_process_group()


def test_a_leak_of_not_a_number_is_a_leak():
    batch = pack(SAMPLES)
    first = int(batch.input_ids[0])

    def forward(batch):  # 0 / 1, and 0 / 0 everywhere once the first sample is changed
        return torch.zeros(batch.num_tokens, 1) / (batch.input_ids[0] == first)

    assert not check_isolation(nn.Identity(), batch, forward=forward).isolated


def test_wrong_arguments_are_named():
    with pytest.raises(ConfigError, match=r"must be a torch\.nn\.Module, got str"):
        pack_for("llama")
    model = nn.Identity()
    with pytest.raises(ConfigError, match="at least 2 samples, got 1"):
        check_isolation(model, pack(SAMPLES[:1]))
    with pytest.raises(ConfigError, match="one entry a token"):
        check_isolation(model, pack(SAMPLES), forward=lambda batch: batch.input_ids[:-1])
    same = [make_sample(0, text=4), make_sample(1, text=4)]
    for sample in same:
        sample.input_ids[:] = np.int32(9)
    with pytest.raises(ConfigError, match="two different ones in the row"):
        check_isolation(model, pack(same), forward=lambda batch: batch.input_ids)


def test_a_model_that_is_not_causal_mixes_samples_and_is_called_unsafe():
    model = make_model("llama", is_causal=False)
    report = pack_for(model)
    assert not report.safe
    assert "not causal" in report.reason
    assert not check_isolation(model, pack(SAMPLES)).isolated


def test_images_that_leak_are_seen_and_least_numbers_hide_no_leak():
    batch = pack(
        [make_sample(0, text=6, tiles_per_image=(2,)), make_sample(1, text=5, tiles_per_image=(1,))]
    )

    def by_pixels(batch):
        return batch.input_ids[:, None].double() + batch.tiles.double().mean()

    def by_sum(batch):
        output = torch.zeros(batch.num_tokens, 2, dtype=torch.float32)
        output[:, 0] = batch.input_ids.cumsum(0)
        output[:, 1] = torch.finfo(torch.float32).min
        return output

    def apart(batch):
        output = by_sum(batch)
        output[:, 0] = batch.input_ids
        output[:, 1] = -torch.inf
        return output

    found = [check_isolation(nn.Identity(), batch, forward=f) for f in (by_pixels, by_sum, apart)]
    assert [report.isolated for report in found] == [False, False, True]


def test_sections_that_only_the_code_knows_are_found():
    config = transformers.AutoConfig.for_model(
        "qwen2_5_vl_text", **{**TINY, "hidden_size": 256, "head_dim": 128}
    )
    assert "mrope_section" not in (config.rope_parameters or {})
    decoder = transformers.AutoModel.from_config(config, attn_implementation="sdpa")
    assert pack_for(decoder).position_rows == 4
