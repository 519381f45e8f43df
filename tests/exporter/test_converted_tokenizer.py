"""Published tokenizers: special tokens, beginnings and ends of texts, and chats of each family in their documented formats."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from sentencepiece import SentencePieceProcessor

from spaceport.exporter.checkpoint_files import ModelFiles, read_optional_json
from spaceport.exporter.converted_checkpoint import PublishedTokenizer, published_tokenizer
from spaceport.graphs.contract.faults import CheckpointError
from support.published_checkpoints import rank_lines, ranks, sentencepiece_model
from support.small_tokenizers import varied_texts


def published(folder: Path, model_type: str, chat_format: str = "raw") -> PublishedTokenizer:
    """The tokenizer in a folder, which may have a tokenizer_config.json."""
    config, settings = {"model_type": model_type}, read_optional_json(folder / "tokenizer_config.json")
    generation = {"chat_format": chat_format}
    return published_tokenizer(ModelFiles(folder, config, generation=generation, tokenizer_config=settings))


def chatglm(folder: Path, source: str = "<|user|> <|observation|>", **config: Any) -> PublishedTokenizer:
    (folder / "tokenizer.model").write_bytes(sentencepiece_model())
    (folder / "tokenization_chatglm.py").write_text(source, "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return published(folder, "chatglm")


def internlm(folder: Path, **config: Any) -> PublishedTokenizer:
    (folder / "tokenizer.model").write_bytes(
        sentencepiece_model(add_dummy_prefix=False, user_defined_symbols="<eoh>,<eoa>")
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return published(folder, "internlm")


def qwen(folder: Path, chat_format: str = "chatml", **config: Any) -> PublishedTokenizer:
    (folder / "qwen.tiktoken").write_bytes(rank_lines(ranks()))
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return published(folder, "qwen", chat_format)


def test_a_chatglm3_text_begins_with_its_prefix(tmp_path: Path) -> None:
    found = chatglm(tmp_path)
    original = SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    last = original.get_piece_size()
    for text in (*varied_texts(300), "a philosophy of sop and eop", "[MASK] [sMASK]"):
        assert found.tokenizer(text).input_ids == [last + 1, last + 3, *original.encode(text)], text
    assert found.end == (2, last + 6, last + 8)
    assert found.tokenizer.convert_ids_to_tokens(range(last, last + 9)) == [
        *("[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>"),
        *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    ]


def test_chatglm2_and_glm_4_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"names the token <\|user\|>: expected ChatGLM3, this may be ChatGLM2"):
        chatglm(tmp_path, source='special_tokens = ["[MASK]", "[gMASK]", "[sMASK]", "sop", "eop"]')
    assert chatglm(tmp_path, source="", added_tokens_decoder={"64795": {"content": "<|user|>"}}).end
    (tmp_path / "tokenizer.model").write_bytes(rank_lines(ranks()))
    with pytest.raises(CheckpointError, match=r"has ranks of tiktoken, as in GLM-4: expected the .*glm-4-9b-chat-hf"):
        published(tmp_path, "chatglm")


def test_an_internlm_text_begins_with_bos(tmp_path: Path) -> None:
    found = internlm(tmp_path)
    original = SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    for text in (*varied_texts(300), "Hello<eoh>\n<|Bot|>:"):
        assert found.tokenizer(text).input_ids == [1, *original.encode(text)], text
    assert found.tokenizer("a<s>b</s>").input_ids == [1, *original.encode("a"), 1, *original.encode("b"), 2]
    assert found.end == (2, original.piece_to_id("<eoa>"))
    assert found.tokenizer.chat_template is None
    assert internlm(tmp_path, add_bos_token=False).tokenizer("a").input_ids == original.encode("a")
    assert internlm(tmp_path, chat_template="{{ messages }}").tokenizer.chat_template == "{{ messages }}"


@pytest.mark.parametrize("family", [chatglm, internlm, qwen])
def test_a_tokenizer_json_in_the_folder_is_used(family: Any, tmp_path: Path) -> None:
    found = family(tmp_path)
    (tmp_path / "tokenizer.json").write_text(found.tokenizer.backend_tokenizer.to_str(), "utf-8")
    for name in ("tokenizer.model", "qwen.tiktoken"):
        (tmp_path / name).unlink(missing_ok=True)
    again = published(tmp_path, family.__name__, chat_format="chatml")
    assert again.end == found.end
    assert again.tokenizer("the ship").input_ids == found.tokenizer("the ship").input_ids


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        (qwen, {"chat_format": "other"}, "chat_format is 'other': expected raw (base model) or chatml (chat model)"),
        (internlm, {"add_eos_token": True}, "add_eos_token is true: expected false, prompts would end before"),
        (internlm, {"chat_template": ["x"]}, "chat_template is ['x']: expected text; save one as chat_template.jinja"),
        (qwen, {"chat_template": "{{ messages[9]['role'] }}"}, "its chat template cannot be rendered ("),
    ],
)
def test_invalid_settings_are_refused(family: Any, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        family(tmp_path, **options)


def test_missing_and_wrong_vocabularies_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no qwen\.tiktoken in it: expected the vocabulary of Qwen v1"):
        published(tmp_path, "qwen")
    with pytest.raises(CheckpointError, match=r"no tokenizer\.model in it: expected the published SentencePiece model"):
        published(tmp_path, "internlm")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: cannot be read"):
        published(tmp_path, "qwen")
    (tmp_path / "other").mkdir()
    other: str = internlm(tmp_path / "other").tokenizer.backend_tokenizer.to_str()
    (tmp_path / "tokenizer.json").write_text(other, "utf-8")
    with pytest.raises(CheckpointError, match=r"has no token '<\|endoftext\|>': expected the tokens of the published"):
        published(tmp_path, "qwen")


HISTORY = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "the ship\n你好 sop"},
    {"role": "assistant", "content": "answer 42"},
    {"role": "user", "content": " philosophy?"},
]


def rendered_tokens(found: PublishedTokenizer, messages: list[dict[str, str]]) -> list[int]:
    """The tokens of messages, as the runtime makes them: the template's text, with nothing added."""
    text = found.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids: list[int] = found.tokenizer(text, add_special_tokens=False).input_ids
    return ids


def test_a_chatglm3_chat_has_the_tokens_of_its_documented_format(tmp_path: Path) -> None:
    found = chatglm(tmp_path)
    original = SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    roles = {role: original.get_piece_size() + 5 + index for index, role in enumerate(("system", "user", "assistant"))}
    expected = [original.get_piece_size() + 1, original.get_piece_size() + 3]
    for message in HISTORY:  # the token of the role, its line with empty metadata, and the content: each on its own
        expected += [roles[message["role"]], *original.encode("\n"), *original.encode(message["content"])]
    assert rendered_tokens(found, HISTORY) == [*expected, roles["assistant"]]
    # what the model writes begins with the rest of its line; the original code removes whitespace around it
    answered = [*HISTORY[:2], {"role": "assistant", "content": "\n answer 42 "}, HISTORY[3]]
    assert rendered_tokens(found, answered) == [*expected, roles["assistant"]]


PUBLISHED_TEMPLATE = (
    "{% for message in messages %}{% if loop.first %}[gMASK]sop{% endif %}<|{{ message['role'] }}|>\n "
    "{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_a_template_in_the_folder_is_used(tmp_path: Path) -> None:
    own = chatglm(tmp_path).tokenizer.chat_template
    assert chatglm(tmp_path, chat_template=PUBLISHED_TEMPLATE).tokenizer.chat_template == own
    other = PUBLISHED_TEMPLATE.replace("\n ", "\n")
    changed = chatglm(tmp_path, chat_template=other).tokenizer.chat_template
    assert changed == other.replace("[gMASK]sop", "[gMASK]<sop>")
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    assert chatglm(tmp_path, chat_template=other).tokenizer.chat_template == "{{ messages[0]['content'] }}"


def test_a_qwen_chat_has_the_tokens_of_its_documented_format(tmp_path: Path) -> None:
    found = qwen(tmp_path)
    end, start, stop = (len(ranks()) + index for index in range(3))
    assert found.end == (end, stop, start)
    assert found.tokenizer("a<|im_end|>").input_ids == [*found.tokenizer("a").input_ids, stop]

    def encoded(text: str) -> list[int]:
        ids: list[int] = found.tokenizer(text).input_ids
        return ids

    default = {"role": "system", "content": "You are a helpful assistant."}
    base = qwen(tmp_path, "raw")
    assert (base.tokenizer.chat_template, base.end) == (None, (len(ranks()),))
    assert base.tokenizer.convert_ids_to_tokens(len(ranks()) + 207) == "<|extra_204|>"
    for messages in (HISTORY, [default, *HISTORY[1:]]):
        expected = []
        for message in messages:
            line = [*encoded(message["role"]), *encoded("\n"), *encoded(message["content"])]
            expected += [start, *line, stop, *encoded("\n")]
        expected += [start, *encoded("assistant"), *encoded("\n")]
        assert rendered_tokens(found, messages) == expected
    assert rendered_tokens(found, HISTORY[1:]) == expected  # the default system message
