"""Chat formats: templates give the tokens of the published formats, and those in a folder are used."""

from __future__ import annotations

from pathlib import Path

from sentencepiece import SentencePieceProcessor

from spaceport.exporter.converted_tokenizer import PublishedTokenizer
from support.published_checkpoints import ranks
from support.published_tokenizers import chatglm, qwen

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
    for messages in (HISTORY, [default, *HISTORY[1:]]):
        expected = []
        for message in messages:
            line = [*encoded(message["role"]), *encoded("\n"), *encoded(message["content"])]
            expected += [start, *line, stop, *encoded("\n")]
        expected += [start, *encoded("assistant"), *encoded("\n")]
        assert rendered_tokens(found, messages) == expected
    assert rendered_tokens(found, HISTORY[1:]) == expected  # the default system message
