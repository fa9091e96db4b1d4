from __future__ import annotations

from pathlib import Path

import pytest

from libs.text import ModelText, load_model_text, resolve_model_path
from tests.unit.text.small_models import byte_level_keys, sentencepiece_keys, write_gguf


@pytest.fixture(scope="session")
def smollm_path() -> Path:
    return resolve_model_path("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def smollm(smollm_path: Path) -> ModelText:
    return load_model_text(smollm_path)


@pytest.fixture(scope="session")
def sentencepiece_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("spm") / "small-spm.gguf", tokenizer=sentencepiece_keys())


@pytest.fixture(scope="session")
def sentencepiece(sentencepiece_path: Path) -> ModelText:
    return load_model_text(sentencepiece_path)


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> ModelText:
    return load_model_text(
        write_gguf(tmp_path_factory.mktemp("bpe") / "small-bpe.gguf", tokenizer=byte_level_keys())
    )
