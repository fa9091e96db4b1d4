"""A tokenizer from a model folder, against the tokenizers library on the same file."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from libs.errors import InvalidRequest, ModelLoadFailed
from libs.text import ChatMessage, IncrementalDetokenizer, ModelText, load_model_text, tokenizer_digest
from libs.text.chat_template import ChatTemplate
from libs.text.gguf_tokenizer import merges_by_score
from tests.unit.text.small_models import added, tokenizer_json, write_folder


@pytest.fixture(scope="module")
def smollm_folder(smollm: ModelText, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(
        tmp_path_factory.mktemp("folder") / "SmolLM2-Copy",
        tokenizer_json(smollm.tokenizer.definition),
        config={"max_position_embeddings": 8192, "eos_token_id": 0},
        generation_config={"eos_token_id": [2, 0]},
        tokenizer_config={
            "bos_token": "<|im_start|>",
            "eos_token": {"content": "<|im_end|>", "special": True},
            "chat_template": "{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}",
        },
    )


@pytest.fixture(scope="module")
def small_tokenizer_json(sentencepiece: ModelText) -> dict[str, Any]:
    definition = sentencepiece.tokenizer.definition
    contents = tokenizer_json(definition)
    contents["model"]["merges"] = [list(merge) for merge in merges_by_score(definition)]
    return contents


def test_folder_and_gguf_of_one_tokenizer_agree_in_ids_and_digest(smollm: ModelText, smollm_folder: Path) -> None:
    from_folder = load_model_text(smollm_folder)

    # The file asks for truncation to four tokens, as some do; a server must not.
    text = "<|im_start|>user\n  12 é🎉 <repo_name>"
    for allow_special in (False, True):
        expected = smollm.tokenizer.encode(text, allow_special=allow_special)
        assert from_folder.tokenizer.encode(text, allow_special=allow_special) == expected
    assert from_folder.tokenizer_digest == smollm.tokenizer_digest


def test_folder_files_say_what_ends_an_answer_and_how_long_it_may_be(smollm_folder: Path) -> None:
    model_text = load_model_text(smollm_folder)

    assert model_text.eos_token_ids == (2, 0)
    assert model_text.max_model_len == 8192
    assert dict(model_text.tokenizer.named_tokens.texts) == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}


def test_merges_are_never_left_out_by_chance(small_tokenizer_json: dict[str, Any], tmp_path: Path) -> None:
    model = small_tokenizer_json["model"] | {"dropout": 0.5}
    tokenizer = load_model_text(write_folder(tmp_path, small_tokenizer_json | {"model": model})).tokenizer

    seen = {tuple(tokenizer.encode("hello the world", allow_special=allows)) for allows in [True, False] * 20}

    assert len(seen) == 1


def test_tokens_that_only_the_tokenizers_config_declares_are_tokens(
    small_tokenizer_json: dict[str, Any], tmp_path: Path
) -> None:
    # transformers adds them when it loads a folder; an end token that is plain text ends no answer.
    size = len(small_tokenizer_json["model"]["vocab"])
    flags = {"special": True, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    without_added = small_tokenizer_json | {"added_tokens": []}
    declared = {
        "eos_token": "</s>",
        "pad_token": "he",
        "additional_special_tokens": ["<s>", "<nowhere>"],
        # The second is another token in tokenizer.json, the third lies beyond a gap.
        "added_tokens_decoder": {
            str(size): {"content": "<call>", **flags},
            "3": {"content": "<strange>", **flags},
            str(size + 9): {"content": "<far>", **flags},
        },
    }

    model_text = load_model_text(write_folder(tmp_path, without_added, tokenizer_config=declared))

    tokenizer = model_text.tokenizer
    assert model_text.eos_token_ids == (2,)
    assert tokenizer.encode("</s><call><s>", allow_special=True) == [2, size, 1]
    assert tokenizer.vocab_size == size + 1
    assert not tokenizer.is_special(tokenizer.encode("he", allow_special=True)[-1])


@pytest.mark.parametrize(
    "decoder", [{"x": {}}, {"3": {}}, {"3": 5}, [1], {"1": {"content": "<s>", "special": 1}}], ids=repr
)
def test_declared_tokens_that_are_none_are_refused(
    small_tokenizer_json: dict[str, Any], tmp_path: Path, decoder: object
) -> None:
    folder = write_folder(tmp_path, small_tokenizer_json, tokenizer_config={"added_tokens_decoder": decoder})

    with pytest.raises(ModelLoadFailed, match="another form"):
        load_model_text(folder)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # As Qwen 2.5 and Qwen 3 tell to serve 131,072 tokens.
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        ({"type": "yarn", "factor": 4.0}, 163840),
        ({"rope_type": "linear", "factor": 2.0}, 81920),
        # What says the stretched length already.
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096}, 40960),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}, 40960),
        ({"rope_type": "default"}, 40960),
        ({"rope_type": "yarn", "factor": "4"}, 40960),
        (None, 40960),
    ],
    ids=repr,
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_stretched_positions_allow_a_longer_context(
    small_tokenizer_json: dict[str, Any], tmp_path: Path, key: str, config: Any, expected: int
) -> None:
    # vllm-project/vllm derives the same; with the configuration's number alone long prompts are refused.
    config = {"model_type": "qwen3", "max_position_embeddings": 40960, key: config}

    model_text = load_model_text(write_folder(tmp_path, small_tokenizer_json, config=config))

    assert model_text.max_model_len == expected


def test_gemma_says_the_stretched_length(small_tokenizer_json: dict[str, Any], tmp_path: Path) -> None:
    config = {
        "model_type": "gemma3_text",
        "max_position_embeddings": 131072,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }

    assert load_model_text(write_folder(tmp_path, small_tokenizer_json, config=config)).max_model_len == 131072


def test_a_folder_says_how_it_is_sampled_from(small_tokenizer_json: dict[str, Any], tmp_path: Path) -> None:
    said = {"temperature": 0.6, "top_k": 20, "top_p": None, "do_sample": True, "max_new_tokens": 10}
    folder = write_folder(tmp_path / "said", small_tokenizer_json, generation_config=said)

    assert load_model_text(folder).sampling_defaults == {"temperature": 0.6, "top_k": 20}
    assert load_model_text(write_folder(tmp_path / "silent", small_tokenizer_json)).sampling_defaults == {}


def test_every_process_computes_the_same_digest(smollm: ModelText, smollm_path: Path, smollm_folder: Path) -> None:
    program = "import sys, pathlib, libs.text as t; print(t.tokenizer_digest(pathlib.Path(sys.argv[1])).hex())"

    for path in (smollm_path, smollm_folder):
        other = subprocess.run(
            [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True, timeout=60
        )
        assert other.stdout.strip() == tokenizer_digest(path).hex() == smollm.tokenizer_digest.hex()


def test_digest_changes_with_anything_that_changes_ids(
    small_tokenizer_json: dict[str, Any], tmp_path: Path
) -> None:
    def digest_of(name: str, **changes: Any) -> bytes:
        contents = {**small_tokenizer_json, **changes}
        return tokenizer_digest(write_folder(tmp_path / name, contents))

    model = small_tokenizer_json["model"]
    swapped = {**model["vocab"], "ll": model["vocab"]["el"], "el": model["vocab"]["ll"]}
    digests = [
        digest_of("same"),
        digest_of("vocabulary", model={**model, "vocab": swapped}),
        digest_of("merges", model={**model, "merges": model["merges"][::-1]}),
        digest_of("normalizer", normalizer={"type": "NFC"}),
        digest_of("pre_tokenizer", pre_tokenizer={"type": "Digits", "individual_digits": True}),
        digest_of("types", added_tokens=[added(1, "<s>", special=False)]),
        digest_of("fallback", model={**model, "byte_fallback": False}),
    ]

    assert len(set(digests)) == len(digests)
    assert digest_of("again") == digests[0]


def test_both_spellings_of_merges_are_one_tokenizer(small_tokenizer_json: dict[str, Any], tmp_path: Path) -> None:
    model = small_tokenizer_json["model"]
    as_texts = {**model, "merges": [" ".join(merge) for merge in model["merges"]]}

    pairs = tokenizer_digest(write_folder(tmp_path / "pairs", small_tokenizer_json))
    texts = tokenizer_digest(write_folder(tmp_path / "texts", {**small_tokenizer_json, "model": as_texts}))

    assert pairs == texts


METASPACE_FIRST = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
METASPACE_ALWAYS = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
WITH_METASPACE = {
    "normalizer": None,
    "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, METASPACE_FIRST]},
}


@pytest.fixture(scope="module", params=["prepend", "first", "always"])
def prefixing_folder(
    request: pytest.FixtureRequest, small_tokenizer_json: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Folders of the three ways in which sentencepiece-like tokenizers put a space before text."""
    changes = {
        "prepend": {},
        "first": WITH_METASPACE | {"pre_tokenizer": METASPACE_FIRST},
        "always": WITH_METASPACE | {"pre_tokenizer": METASPACE_ALWAYS},
    }[request.param]
    contents = {**small_tokenizer_json, "truncation": None, **changes}
    return write_folder(tmp_path_factory.mktemp("prefix") / request.param, contents)


TEXTS = st.lists(st.sampled_from(["hello", " the", "  ", "x", "é", "🎉", "<s>", "</s>", "\n"]), max_size=10).map(
    "".join
)


@given(text=TEXTS)
def test_sections_encoded_apart_give_the_ids_of_the_whole(prefixing_folder: Path, text: str) -> None:
    model_text = _loaded(prefixing_folder)
    library = _library(prefixing_folder)

    together = library.encode(text, add_special_tokens=False).ids

    assert model_text.tokenizer.encode(text, allow_special=True) == together
    assert model_text.tokenizer.encode_protected(text) == together


@given(token_ids=st.lists(st.sampled_from([1, 2, *range(259, 288)]), max_size=12))
def test_stream_starts_with_the_spaces_the_library_leaves(prefixing_folder: Path, token_ids: list[int]) -> None:
    detokenizer = IncrementalDetokenizer(_loaded(prefixing_folder).tokenizer)

    text = "".join(detokenizer.add([token_id]) for token_id in token_ids) + detokenizer.flush()

    assert text == _library(prefixing_folder).decode(token_ids, skip_special_tokens=True)


def test_control_tokens_take_the_white_space_that_they_are_declared_to_take(
    small_tokenizer_json: dict[str, Any], tmp_path: Path
) -> None:
    flagged = [added(1, "<s>", rstrip=True), added(2, "</s>", lstrip=True), added(0, "<unk>", single_word=True)]
    contents = {**small_tokenizer_json, "truncation": None, "added_tokens": flagged}
    folder = write_folder(tmp_path / "strips", contents)
    model_text, library = load_model_text(folder), tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))

    for text in ("<s> \n hello", "hello  </s>the", "<s>  </s>", "  <s>", "x<unk>", "hello <unk> the", "<unk>x"):
        expected = library.encode(text, add_special_tokens=False).ids
        assert model_text.tokenizer.encode_protected(text) == expected, repr(text)


def test_a_vocabulary_that_reaches_control_tokens_from_plain_text_is_broken_up(
    small_tokenizer_json: dict[str, Any], tmp_path: Path
) -> None:
    model = small_tokenizer_json["model"]
    leaking = {**small_tokenizer_json, "model": {**model, "merges": [*model["merges"], ["<s", ">"]]}}
    tokenizer = load_model_text(write_folder(tmp_path / "leaking", leaking)).tokenizer
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "leaking" / "tokenizer.json"))
    library.encode_special_tokens = True
    assert 1 in library.encode("a<s>", add_special_tokens=False).ids

    token_ids = tokenizer.encode("a<s>the", allow_special=False)

    assert not any(map(tokenizer.is_special, token_ids))
    assert b"".join(map(tokenizer.token_bytes, token_ids)) == b" a<s>the"


def test_what_the_post_processor_puts_before_a_prompt_is_its_prefix(
    small_tokenizer_json: dict[str, Any], tmp_path: Path
) -> None:
    def special(name: str) -> dict[str, Any]:
        return {"SpecialToken": {"id": name, "type_id": 0}}

    post_processor = {
        "type": "TemplateProcessing",
        "single": [special("<s>"), {"Sequence": {"id": "A", "type_id": 0}}, special("</s>")],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {
            "<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]},
            "</s>": {"id": "</s>", "ids": [2], "tokens": ["</s>"]},
        },
    }
    # Padding and truncation are for training; a server's prompts have the length that they have.
    padding = {
        "strategy": {"Fixed": 8},
        "direction": "Left",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<unk>",
    }
    contents = {**small_tokenizer_json, "padding": padding, "post_processor": post_processor}

    model_text = load_model_text(write_folder(tmp_path / "bos", contents))

    assert model_text.prompt_prefix_token_ids == (1,)
    assert 1 not in model_text.tokenizer.encode("hello", allow_special=True)


def test_tokens_in_control_brackets_are_control_even_if_the_file_forgot_the_flag(
    small_tokenizer_json: dict[str, Any], tmp_path: Path
) -> None:
    size = len(small_tokenizer_json["model"]["vocab"])
    forgotten = [added(size, "<|user|>", special=False), added(size + 1, "<think>", special=False)]
    contents = {**small_tokenizer_json, "added_tokens": [*small_tokenizer_json["added_tokens"], *forgotten]}
    tokenizer = load_model_text(write_folder(tmp_path / "forgot", contents)).tokenizer

    plain = tokenizer.encode("<|user|><think>", allow_special=False)

    assert tokenizer.is_special(size)
    assert not tokenizer.is_special(size + 1)
    assert size not in plain
    assert plain[-1] == size + 1
    assert tokenizer.vocab_size == size + 2


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}, "decodes with"),
        ({"decoder": None}, "decodes with nothing"),
        ({"pre_tokenizer": {"type": "Unheard"}}, "cannot be loaded"),
        ({"model": {"type": "BPE", "vocab": {}, "merges": [["a", "b"]]}}, "cannot be loaded"),
    ],
)
def test_what_cannot_be_served_is_refused(
    small_tokenizer_json: dict[str, Any], tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    folder = write_folder(tmp_path / "odd", {**small_tokenizer_json, **changes})

    with pytest.raises(ModelLoadFailed, match=sentence):
        load_model_text(folder)


def test_missing_or_broken_files_are_named(small_tokenizer_json: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelLoadFailed, match=r"empty has no tokenizer\.json\. Make one with"):
        load_model_text(tmp_path / "empty")

    folder = write_folder(tmp_path / "no-length", small_tokenizer_json, config={})
    with pytest.raises(ModelLoadFailed, match="no max_position_embeddings"):
        load_model_text(folder)

    (folder / "config.json").write_text("{", "utf-8")
    with pytest.raises(ModelLoadFailed, match=r"no-length/config\.json cannot be read"):
        load_model_text(folder)


def test_template_file_wins_over_the_config_and_a_list_has_a_default(
    small_tokenizer_json: dict[str, Any], tmp_path: Path
) -> None:
    listed = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    folder = write_folder(tmp_path / "t", small_tokenizer_json, tokenizer_config={"chat_template": listed})
    message = [ChatMessage("user", "hi")]

    from_config = load_model_text(folder).chat_template.render(message, add_generation_prompt=True)
    (folder / "chat_template.jinja").write_text("F", "utf-8")
    from_file = load_model_text(folder).chat_template.render(message, add_generation_prompt=True)

    assert (from_config, from_file) == ("D", "F")


TOOL_USE = "T{% for tool in tools %}{{ tool.function.name }}{% endfor %}{{ messages[0].content }}"
TOOLS = [{"type": "function", "function": {"name": "look"}}]


def rendered(model_text: ModelText, tools: list[dict[str, Any]]) -> str:
    tokenizer = model_text.tokenizer
    ids = model_text.chat_template.render_token_ids(
        [ChatMessage("user", "hello")], tokenizer, add_generation_prompt=True, tools=tools
    )
    return b"".join(map(tokenizer.token_bytes, ids)).decode().lstrip()


def _listed(folder: Path) -> None:
    listed = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": TOOL_USE}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))


def _in_files(folder: Path) -> None:
    # The configuration's does not count beside a file, as in transformers.
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "old"}))
    (folder / "chat_template.jinja").write_text("D")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(TOOL_USE)


@pytest.mark.parametrize("write", [_listed, _in_files])
def test_requests_with_tools_have_a_template_of_their_own(
    small_tokenizer_json: dict[str, Any], tmp_path: Path, write: Callable[[Path], None]
) -> None:
    folder = write_folder(tmp_path, small_tokenizer_json)
    write(folder)

    model_text = load_model_text(folder)

    assert rendered(model_text, []) == "D"
    assert rendered(model_text, TOOLS) == "Tlookhello"
    assert model_text.chat_template.render([ChatMessage("user", "hello")], add_generation_prompt=True) == "D"


def test_a_model_may_have_a_template_for_tools_alone(small_tokenizer_json: dict[str, Any], tmp_path: Path) -> None:
    listed = [{"name": "tool_use", "template": TOOL_USE + "{{ mood }}"}]
    folder = write_folder(tmp_path, small_tokenizer_json, tokenizer_config={"chat_template": listed})

    model_text = load_model_text(folder)

    assert rendered(model_text, TOOLS) == "Tlookhello"
    assert model_text.chat_template.variables == {"mood"}
    with pytest.raises(InvalidRequest, match="no chat template"):
        rendered(model_text, [])


@functools.cache
def _loaded(folder: Path) -> ModelText:
    return load_model_text(folder)


@functools.cache
def _library(folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.mark.parametrize(
    "eos_token_id", [-1, 10**6, 2**33, "2", 2.0, True, [2, "x"], [2, None, -1], [[2]], {"id": 2}], ids=repr
)
def test_an_end_token_outside_the_vocabulary_is_refused(
    smollm: ModelText, tmp_path: Path, eos_token_id: object
) -> None:
    # As in vllm-project/vllm#4180: end tokens come as numbers and as lists, and some are wrong.
    contents = tokenizer_json(smollm.tokenizer.definition)
    folder = write_folder(tmp_path / "Model", contents, generation_config={"eos_token_id": eos_token_id})

    with pytest.raises(ModelLoadFailed, match=r"generation_config\.json of Model names the end token"):
        load_model_text(folder)


@pytest.mark.parametrize(
    "chat_template", [5, {"default": "x"}, [{"name": "default", "template": 5}], {"template": None}], ids=repr
)
def test_a_chat_template_that_is_no_text_is_refused(
    smollm: ModelText, tmp_path: Path, chat_template: object
) -> None:
    contents = tokenizer_json(smollm.tokenizer.definition)
    folder = write_folder(tmp_path / "Model", contents, tokenizer_config={"chat_template": chat_template})

    with pytest.raises(ModelLoadFailed, match="chat_template"):
        load_model_text(folder)


def test_entries_of_a_list_of_chat_templates_that_say_nothing_are_passed_over(
    smollm: ModelText, tmp_path: Path
) -> None:
    entries = ["x", {"name": "tools"}, {"template": "y"}, {"name": "default", "template": "hello"}]
    contents = tokenizer_json(smollm.tokenizer.definition)

    folder = write_folder(tmp_path / "Model", contents, tokenizer_config={"chat_template": entries})

    template = load_model_text(folder).chat_template
    assert isinstance(template, ChatTemplate)
    assert template.source == "hello"


def test_a_chat_template_that_is_not_utf8_is_refused(smollm: ModelText, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "Model", tokenizer_json(smollm.tokenizer.definition))
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe{{ messages }}")

    with pytest.raises(ModelLoadFailed, match=r"chat_template\.jinja cannot be read"):
        load_model_text(folder)
