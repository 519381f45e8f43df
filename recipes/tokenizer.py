"""Tokenizer: byte-level BPE with a small vocabulary, trained on the corpus."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TOKENS = 1264  # including the four special tokens below; tuning adds its tokens after them
LONGEST_TEXT = 1024  # tokens

BOS, EOS, START, END = "<s>", "</s>", "<|start|>", "<|end|>"

_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|start|>' + message['role'] + '\\n' + message['content'] + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start|>assistant\\n' }}
{%- endif %}
"""


def train_tokenizer(
    texts: Iterable[str],
    size: int = TOKENS,
    added: Sequence[str] = (),
    split: Sequence[pre_tokenizers.PreTokenizer] = (pre_tokenizers.Digits(individual_digits=True),),
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer that starts every text with bos.

    `split` pre-tokenizes texts, by default into single digits. `added` are further special tokens.
    """
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence([*split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[BOS, EOS, START, END, *added],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    bos = [(BOS, core.token_to_id(BOS))]
    opening = processors.TemplateProcessing(single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=bos)
    core.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), opening])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=BOS,
        eos_token=EOS,
        extra_special_tokens=[START, END, *added],
        chat_template=_TEMPLATE,
        model_max_length=LONGEST_TEXT,
        clean_up_tokenization_spaces=False,
    )
