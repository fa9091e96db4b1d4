from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from libs.errors import ModelLoadFailed
from services.worker.layers.threads import OperatorThreads
from services.worker.models.decoder import Decoder
from services.worker.models.description import describe
from services.worker.weight_files import open_weights
from services.worker.weights import (
    LLAMA,
    MISTRAL,
    FrequencyFactors,
    LinearRopeScaling,
    Llama3RopeScaling,
    WeightReader,
    WeightSource,
    YarnRopeScaling,
)
from tests.unit.worker.small_gguf import GgufType, write_gguf
from tests.unit.worker.small_models import FAMILIES, VOCAB_SIZE, WINDOW, random_llama, random_model, save_model


def load_all(source: WeightSource) -> WeightReader:
    """Read everything that a model needs, with all checks."""
    reader = WeightReader(source, torch.float32, lambda done, total: None)
    Decoder(source.config, reader, torch.float32, OperatorThreads(1))
    return reader


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_folder_gives_config_and_tensors(tmp_path: Path) -> None:
    model = random_llama()

    source = open_weights(save_model(model, tmp_path))

    assert source.config.num_layers == 2
    assert (source.config.num_heads, source.config.num_kv_heads, source.config.head_dim) == (6, 2, 8)
    assert not source.config.has_tied_embeddings
    for name, tensor in model.state_dict().items():
        assert torch.equal(source.read(name), tensor)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"head_dim": 12}])
def test_parameters_are_counted(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    model = random_model(family, **changes)

    source = open_weights(save_model(model, tmp_path))

    assert source.config.num_parameters == sum(parameter.numel() for parameter in model.parameters())


def test_a_folder_of_the_older_form_says_the_same(tmp_path: Path) -> None:
    model = random_model("gemma3", num_hidden_layers=7, layer_types=None, sliding_window_pattern=3)
    newer = open_weights(save_model(model, tmp_path)).config
    config = json.loads((tmp_path / "config.json").read_text())
    for key in ("layer_types", "rope_parameters", "dtype", "architectures", "tie_word_embeddings"):
        config.pop(key, None)
    config |= {"sliding_window_pattern": 3, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": None}

    (tmp_path / "config.json").write_text(json.dumps(config))

    assert newer.layer_windows == (WINDOW, WINDOW, None, WINDOW, WINDOW, None, WINDOW)
    assert open_weights(tmp_path).config == newer


def test_a_folder_may_hold_several_files(tmp_path: Path) -> None:
    source = open_weights(save_model(random_llama(), tmp_path, max_shard_size="40KB"))

    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert load_all(source).kept_bytes == sum(source.sizes_bytes.values())


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    save_model(random_llama(), tmp_path, max_shard_size="40KB")
    part = sorted(tmp_path.glob("*.safetensors"))[1]
    part.unlink()

    with pytest.raises(ModelLoadFailed, match=part.name):
        open_weights(tmp_path)


@pytest.mark.parametrize("name", ["consolidated", "adapter_model", "zz-copy", "model.fp16"])
def test_files_beside_the_whole_model_are_no_part_of_it(tmp_path: Path, name: str) -> None:
    # As in huggingface/transformers#26729 and Blaizzy/mlx-vlm#1464: whatever lay in the folder was read as well.
    model = random_llama()
    folder = save_model(model, tmp_path)
    stored = load_file(folder / "model.safetensors")
    others = {key.removeprefix("model.") if name == "consolidated" else key: value for key, value in stored.items()}
    save_file({key: torch.zeros_like(value) for key, value in others.items()}, folder / f"{name}.safetensors")

    source = open_weights(folder)

    load_all(source)
    for key, tensor in model.state_dict().items():
        assert torch.equal(source.read(key), tensor)


def test_a_tensor_that_two_files_hold_is_refused(tmp_path: Path) -> None:
    folder = save_model(random_llama(), tmp_path, max_shard_size="40KB")
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    stored = load_file(first)
    name = min(stored)
    save_file(load_file(second) | {name: torch.zeros_like(stored[name])}, second)

    with pytest.raises(ModelLoadFailed, match=f"{first.name} and {second.name} in .* both hold the tensor {name}"):
        open_weights(folder)


def test_names_may_lack_the_prefix_of_the_model(tmp_path: Path) -> None:
    # Files that were saved without the head's class have them so; transformers reads both.
    model = random_llama()
    path = save_model(model, tmp_path) / "model.safetensors"
    save_file({name.removeprefix("model."): tensor for name, tensor in load_file(path).items()}, path)

    source = open_weights(tmp_path)

    load_all(source)
    for name, tensor in model.state_dict().items():
        assert torch.equal(source.read(name), tensor)


@pytest.mark.parametrize("is_equal", [False, True])
def test_a_head_that_is_not_the_embedding_is_used_though_the_config_ties_them(
    tmp_path: Path, is_equal: bool
) -> None:
    # As transformers 5 does; its older versions, and vLLM, give other logits than were trained.
    model = random_llama()
    path = save_model(model, tmp_path) / "model.safetensors"
    edit_config(tmp_path, tie_word_embeddings=True)
    if is_equal:
        stored = load_file(path)
        save_file(stored | {"lm_head.weight": stored["model.embed_tokens.weight"].clone()}, path)

    source = open_weights(tmp_path)

    assert source.config.has_tied_embeddings is is_equal
    load_all(source)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma3"])
def test_what_a_config_leaves_out_is_what_transformers_fills_in(tmp_path: Path, family: str) -> None:
    save_model(random_model(family, rms_norm_eps=1e-6), tmp_path)
    whole = open_weights(tmp_path).config
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rms_norm_eps"]

    (tmp_path / "config.json").write_text(json.dumps(config))

    assert open_weights(tmp_path).config == whole


def test_progress_counts_all_bytes(tmp_path: Path) -> None:
    source = open_weights(save_model(random_llama(), tmp_path))
    reports: list[tuple[int, int]] = []

    Decoder(
        source.config,
        WeightReader(source, torch.float32, lambda done, total: reports.append((done, total))),
        torch.float32,
        OperatorThreads(1),
    )

    assert reports == sorted(reports)
    assert reports[-1][0] == reports[-1][1] == sum(source.sizes_bytes.values())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "q_proj.bias is missing"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "no window"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "less than one token"),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "Gemma3ForConditionalGeneration"),
        ({"architectures": ["Qwen2ForCausalLM"]}, "attention_bias"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "q_norm.weight is missing"),
        ({"hidden_size": "wide"}, "cannot be understood"),
        # The whole of such a configuration can be pages long.
        ({"quantization_config": {"quant_method": "awq", "modules": ["x"] * 9}}, "quant_method = 'awq', which is"),
        ({"quantization_config": ["awq"]}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "does not say factor"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}}, "part of each"),
        ({"num_key_value_heads": 4}, "cannot share"),
        ({"intermediate_size": 81}, r"gate_proj.*\(80, 48\).*\(81, 48\)"),
        ({"num_hidden_layers": 3}, "model.layers.2.*missing"),
        ({"num_hidden_layers": 1}, "does not use"),
        ({"tie_word_embeddings": True, "num_hidden_layers": 3}, "missing"),
        # Damaged files say anything.
        ({"num_hidden_layers": 0}, "0 layers"),
        ({"num_hidden_layers": 10**12}, "1000000000000 layers"),
        ({"num_attention_heads": 0}, "num_heads is 0|cannot be understood"),
        ({"intermediate_size": -80}, "intermediate_size is -80"),
        # Tables of so many values would take the memory before the weights are compared with it.
        ({"head_dim": 2**31}, "head_dim is 2147483648"),
        ({"head_dim": 10**30}, "head_dim is 1000"),
        ({"vocab_size": 2**40}, "vocab_size is 1099511627776"),
        ({"max_position_embeddings": 2**31}, "max_position is 2147483648"),
        ({"max_position_embeddings": 0}, "max_position is 0"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"hidden_size": float("inf")}, "cannot be understood"),
        ({"architectures": 5}, "architecture 5"),
        ({"rope_parameters": "linear"}, "cannot be understood"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0.0}}, "above 0"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": -4.0}}, "above 0"),
        ({"rope_parameters": {"rope_theta": -1.0}}, "above 0"),
        (
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 1.0,
                    "original_max_position_embeddings": 64,
                }
            },
            "above 0",
        ),
    ],
)
def test_what_cannot_be_served_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    save_model(random_llama(), tmp_path)
    edit_config(tmp_path, **changes)

    with pytest.raises(ModelLoadFailed, match=words):
        load_all(open_weights(tmp_path))


def _no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _torn_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5_000])


def _torn_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"architectures": ')


@pytest.mark.parametrize("damage", [_no_config, _no_weights, _torn_weights, _torn_config])
def test_a_damaged_folder_is_refused(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    save_model(random_llama(), tmp_path)
    damage(tmp_path)

    with pytest.raises(ModelLoadFailed):
        load_all(open_weights(tmp_path))


def test_llama3_scaling_is_read(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    save_model(random_llama(), tmp_path)
    edit_config(tmp_path, rope_parameters=rope)

    config = open_weights(tmp_path).config

    assert config.rope_theta == 500_000.0
    assert config.rope_scaling == Llama3RopeScaling(8.0, 1.0, 4.0, 64)


def test_a_stretched_context_is_served_whole(tmp_path: Path) -> None:
    save_model(random_llama(), tmp_path)
    edit_config(tmp_path, rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 10_000.0})

    assert open_weights(tmp_path).config.max_position == 4 * 512


def rounded_scale(scale: float | None) -> float | None:
    return None if scale is None else float(np.float32(scale))


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "qwen2 with windows"])
def test_gguf_gives_the_same_as_the_folder(tmp_path: Path, family: str) -> None:
    model = random_model(family)
    folder = open_weights(save_model(model, tmp_path / "folder")).config

    source = open_weights(write_gguf(model, tmp_path / "model.gguf"))

    # The file keeps fp32, and Mistral is Llama there.
    assert source.config == dataclasses.replace(
        folder,
        architecture=LLAMA if folder.architecture == MISTRAL else folder.architecture,
        rms_norm_eps=float(np.float32(folder.rms_norm_eps)),
        attention_scale=rounded_scale(folder.attention_scale),
    )
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight" or not folder.has_tied_embeddings:
            # What Gemma adds to one is stored as the sum.
            torch.testing.assert_close(source.read(name), tensor, rtol=0, atol=1e-7 if "norm" in name else 0)
    load_all(source)


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [
        (GgufType.F16, 1e-3),
        (GgufType.BF16, 4e-3),
        (GgufType.Q8_0, 1e-2),
        (GgufType.Q5_0, 0.1),
        (GgufType.Q4_0, 0.2),
        (GgufType.Q4_1, 0.2),
    ],
)
def test_quantized_gguf_is_near_the_original(tmp_path: Path, kind: GgufType, tolerance: float) -> None:
    model = random_llama(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96)

    source = open_weights(write_gguf(model, tmp_path / "model.gguf", kind))

    for name, tensor in model.state_dict().items():
        assert (source.read(name) - tensor).abs().max() <= tolerance
    load_all(source)


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("llama", {"expert_count": 4}, "mixture of experts"),
        ("llama", {"rope_scaling_type": gguf.RopeScalingType.YARN}, r"does not say llama\.rope\.scaling\.factor"),
        ("llama", {"rope_scaling_type": gguf.RopeScalingType.LONGROPE}, "longrope"),
        ("llama", {"rope_scaling_attn_factors": 0.5}, r"rope\.scaling\.attn_factor"),
        ("llama", {"rope_dimension_count": 4}, "part of each head"),
        ("llama", {"value_length": 4}, "different sizes"),
        ("qwen2", {"sliding_window": 32}, "in which layers"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ],
)
def test_gguf_variants_are_refused(tmp_path: Path, family: str, changes: dict[str, Any], words: str) -> None:
    write_gguf(random_model(family), tmp_path / "model.gguf", **changes)

    with pytest.raises(ModelLoadFailed, match=words):
        open_weights(tmp_path / "model.gguf")


def test_gguf_of_another_architecture_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "model.gguf"), "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    with pytest.raises(ModelLoadFailed, match="mamba"):
        open_weights(tmp_path / "model.gguf")


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model at all", b"GGUF\x03\x00\x00\x00" + b"\xff" * 64])
def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.gguf").write_bytes(content)

    with pytest.raises(ModelLoadFailed, match=r"model\.gguf"):
        open_weights(tmp_path / "model.gguf")


def test_gguf_frequency_factors_are_read(tmp_path: Path) -> None:
    model = random_llama()
    path = tmp_path / "model.gguf"
    factors = [1.0, 2.0, 4.0, 8.0]

    write_gguf(model, path, more_tensors={"rope_freqs.weight": torch.tensor(factors)})

    assert open_weights(path).config.rope_scaling == FrequencyFactors(tuple(factors))


def test_the_vocabulary_of_a_gguf_is_as_large_as_its_embedding(tmp_path: Path) -> None:
    # As in cool-japan/oxibonsai#1: the key said 151,936 and the embedding had 151,669 rows.
    path = write_gguf(random_llama(), tmp_path / "model.gguf")
    reader = gguf.GGUFReader(path, "r+")
    reader.fields["llama.vocab_size"].parts[-1][0] = VOCAB_SIZE + 3
    reader.data.flush()

    source = open_weights(path)

    assert source.config.vocab_size == VOCAB_SIZE
    load_all(source)


def test_weights_that_git_left_behind_are_named(tmp_path: Path) -> None:
    # What "header too large" of the safetensors library mostly means.
    folder = save_model(random_llama(), tmp_path)
    (folder / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1\n"
    )

    with pytest.raises(ModelLoadFailed, match=r"model\.safetensors is a pointer of Git LFS.*git lfs pull"):
        open_weights(folder)


def test_gguf_scalings_are_read(tmp_path: Path) -> None:
    kinds = gguf.RopeScalingType
    linear = write_gguf(
        random_llama(), tmp_path / "linear.gguf", rope_scaling_type=kinds.LINEAR, rope_scaling_factor=4.0
    )
    yarn = write_gguf(
        random_model("qwen2"),
        tmp_path / "yarn.gguf",
        rope_scaling_type=kinds.YARN,
        rope_scaling_factor=4.0,
        rope_scaling_orig_ctx_len=128,
    )

    assert open_weights(linear).config.rope_scaling == LinearRopeScaling(4.0)
    amplitude = 0.1 * math.log(4.0) + 1.0
    assert open_weights(yarn).config.rope_scaling == YarnRopeScaling(4.0, 128, 32.0, 1.0, amplitude, True)


@pytest.mark.parametrize("key", ["llama.rope.scaling.factor", "llama.rope.scale_linear"])
def test_a_gguf_factor_without_a_type_is_linear(tmp_path: Path, key: str) -> None:
    # As llama.cpp reads it; the second key is that of files from 2023.
    path = write_gguf(random_llama(), tmp_path / "model.gguf", key_value=(key, 4.0, gguf.GGUFValueType.FLOAT32))

    assert open_weights(path).config.rope_scaling == LinearRopeScaling(4.0)


@pytest.mark.parametrize("count", [3, 5])
def test_gguf_frequency_factors_that_do_not_fit_a_head_are_refused(tmp_path: Path, count: int) -> None:
    path = write_gguf(
        random_llama(), tmp_path / "model.gguf", more_tensors={"rope_freqs.weight": torch.ones(count)}
    )

    with pytest.raises(ModelLoadFailed, match=f"{count} frequency factors do not fit heads of 8 values"):
        open_weights(path)


@pytest.mark.parametrize("kind", [4, 31, 99, 2**31, 2**32 - 1])
def test_a_gguf_format_that_nobody_knows_is_refused_by_tensor_and_number(tmp_path: Path, kind: int) -> None:
    path = write_gguf(random_llama(), tmp_path / "model.gguf")
    edit_gguf_tensor(path, "blk.0.attn_q.weight", part=4, value=kind)

    with pytest.raises(ModelLoadFailed, match=rf"blk\.0\.attn_q\.weight has the unknown format number {kind}"):
        open_weights(path)


@pytest.mark.parametrize("offset", [0, 7, 32, 2**40, 2**64 - 32])
def test_a_gguf_tensor_that_lies_on_another_is_refused(tmp_path: Path, offset: int) -> None:
    # Its values would be those of others, and nothing would say so.
    path = write_gguf(random_llama(), tmp_path / "model.gguf")
    edit_gguf_tensor(path, "blk.0.attn_q.weight", part=5, value=offset)

    with pytest.raises(ModelLoadFailed, match=rf"blk\.0\.attn_q\.weight begins at byte {offset} of the data"):
        open_weights(path)


def test_a_gguf_tensor_of_another_size_than_its_place_is_refused(tmp_path: Path) -> None:
    path = write_gguf(random_llama(), tmp_path / "model.gguf")
    edit_gguf_tensor(path, "blk.0.attn_q.weight", part=4, value=GgufType.F16)

    with pytest.raises(ModelLoadFailed, match="begins at byte"):
        open_weights(path)


def edit_gguf_tensor(path: Path, name: str, *, part: int, value: int) -> None:
    """Overwrite a part of a tensor's entry: 4 is its format, 5 its offset."""
    reader = gguf.GGUFReader(path, "r+")
    (tensor,) = [one for one in reader.tensors if one.name == name]
    tensor.field.parts[part][0] = value
    reader.data.flush()


def test_gemmas_windows_are_known_without_their_keys(tmp_path: Path) -> None:
    pattern = ["full_attention" if layer == 5 else "sliding_attention" for layer in range(7)]
    model = random_model("gemma3", num_hidden_layers=7, layer_types=pattern, query_pre_attn_scalar=16)
    folder = open_weights(save_model(model, tmp_path / "folder")).config
    path = write_gguf(model, tmp_path / "model.gguf", are_windows_and_scale_said=False)

    config = open_weights(path).config

    assert config.layer_windows == folder.layer_windows == (*[WINDOW] * 5, None, WINDOW)
    assert (config.window_rope_theta, config.attention_scale) == (10_000.0, None)
    assert describe(config).operations[0] == describe(folder).operations[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 0, "head_dim": None},
        {"num_hidden_layers": 10**15},
        {"architectures": {"a": 1}},
        {"rope_parameters": "x"},
        {"layer_types": 5},
        {"vocab_size": "x"},
    ],
)
def test_a_config_that_no_model_could_have_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = save_model(random_llama(), tmp_path)
    edit_config(folder, **changes)

    with pytest.raises(ModelLoadFailed):
        open_weights(folder)


def test_a_config_that_is_nested_too_deep_is_refused(tmp_path: Path) -> None:
    folder = save_model(random_llama(), tmp_path)
    (folder / "config.json").write_text("[" * 100_000)

    with pytest.raises(ModelLoadFailed):
        open_weights(folder)


@pytest.mark.parametrize(
    "weight_map",
    [
        {"a": "../model.safetensors"},
        {"a": "/model.safetensors"},
        {"a": "folder/model.safetensors"},
        {"a": 5},
        {"a": {}},
        {"a": 5, "b": "x"},
        [1],
    ],
)
def test_an_index_names_files_beside_it_and_nothing_else(tmp_path: Path, weight_map: Any) -> None:
    folder = save_model(random_llama(), tmp_path / "model")
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    with pytest.raises(ModelLoadFailed):
        open_weights(folder)


@pytest.mark.parametrize("changes", [{"head_count": 5}, {"head_count_kv": 4}, {"head_count": 48}])
def test_gguf_heads_that_do_not_fit_the_tensors_are_refused(tmp_path: Path, changes: dict[str, int]) -> None:
    # The rows of such tensors cannot even be put in order.
    path = write_gguf(random_llama(), tmp_path / "model.gguf")
    reader = gguf.GGUFReader(path, "r+")
    for key, value in changes.items():
        reader.fields[f"llama.attention.{key}"].parts[-1][0] = value
    reader.data.flush()

    with pytest.raises(ModelLoadFailed):
        load_all(open_weights(path))
