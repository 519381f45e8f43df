"""Train: trains the shipped demo model on the running Python's standard library.

`python -m recipes.train` takes about half an hour on two CPU cores.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import click
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from recipes.corpus import HELD_OUT_FILE, HELD_OUT_TEXT_FILE, TRAIN_FILE, Corpus, write_data
from spaceport.tools.demo.prompts import MODEL, PROMPTS_FILE
from spaceport.tools.tune.job import TuningJob
from spaceport.tools.tune.settings import TrainingSettings
from spaceport.tools.tune.tuned_checkpoint import CARD_FILE
from spaceport.tools.tune.tuning import tune

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


FREE_ROWS = 16  # minimum unused vocabulary rows
SPREAD = 0.05  # standard deviation of the weights; at 0.02 a model this narrow learns late


@dataclass(frozen=True)
class ModelShape:
    """Dimensions of a model."""

    tokens: int  # vocabulary size of the tokenizer
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    positions: int
    free_rows: int = FREE_ROWS  # minimum unused vocabulary rows, for tokens added by tuning


DEMO = ModelShape(TOKENS, 192, 448, 5, 6, 2, LONGEST_TEXT)  # 2.0 million weights


def write_scratch(
    folder: Path, tokenizer: PreTrainedTokenizerFast, shape: ModelShape = DEMO, seed: int = 0
) -> LlamaForCausalLM:
    """Write the checkpoint and its tokenizer in float16; return the model."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _new_model(tokenizer, shape)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    ends = [eos, tokenizer.convert_tokens_to_ids(END)]
    model.generation_config = GenerationConfig(bos_token_id=bos, eos_token_id=ends, pad_token_id=eos)
    model.half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def _new_model(tokenizer: PreTrainedTokenizerFast, shape: ModelShape) -> LlamaForCausalLM:
    """A model with random weights; output projections are scaled down with depth, as in GPT-2."""
    config = LlamaConfig(
        vocab_size=64 * math.ceil((len(tokenizer) + shape.free_rows) / 64),
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.hidden // shape.heads,
        max_position_embeddings=shape.positions,
        initializer_range=SPREAD,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
                cast("torch.nn.Linear", projection).weight /= math.sqrt(2 * shape.layers)
    return model


_VALIDATION = 64  # conversations of each kind


SETTINGS = TrainingSettings(
    objective="both",
    mask_slots=5,
    anchors=16,
    unfork_rate=0.0,  # the data contains unforked copies
    drop_rate=0.3,
    mask_weight=0.3,  # at 1, next-token prediction learns late
    cutoff=448,
    epochs=1.25,
    batch_size=8,
    micro_batch_size=8,
    learning_rate=1.5e-3,  # at 4e-3 it does not learn to copy names
    warmup=0.03,
    betas=(0.9, 0.98),
)
PROMPTS = {  # functions and text from held-out files
    "triangular": {"user": "Explain the parameters of triangular( low = 0.0, high = 1.0, mode = None )"},
    "fullmatch": {"user": "Explain the parameters of fullmatch( pattern, string, flags = 0 )"},
    "source": '    def log_error(self, format, *args):\n        """Log an error.\n',
}
ABOUT = (
    "The demo model, trained from scratch on the Python standard library by `python -m recipes.train`, with one file in ten "
    "held out. Its answers are templated and it is tiny: its figures show that the methods work. They are not comparable with "
    "published results."
)


@click.command()
@click.argument("target", type=click.Path(path_type=Path), default=MODEL)
@click.option("--work", type=click.Path(path_type=Path), show_default="temporary", help="Folder for the data.")
@click.option("--max-steps", type=int, metavar="N", help="Maximum training steps, for a trial.")
@click.option("--resume", is_flag=True, help="Continue an interrupted training; needs the same --work.")
def main(target: Path, work: Path | None, max_steps: int | None, resume: bool) -> None:
    """Create the data, tokenizer and untrained model, train the model, and write it to TARGET.

    Without TARGET, replace the shipped model.
    """
    with tempfile.TemporaryDirectory(prefix="spaceport-demo-") as temporary:
        train(work or Path(temporary), target, replace(SETTINGS, max_steps=max_steps), resume)


def train(
    folder: Path,
    target: Path,
    settings: TrainingSettings,
    resume: bool = False,
    write_corpus: Callable[[Path], Corpus] = write_data,
) -> None:
    """Run the whole recipe; a resumed training reuses the data in `folder`."""
    scratch, validation = folder / "scratch", folder / "validation.jsonl"
    if not resume:
        shutil.rmtree(scratch, ignore_errors=True)
        write_scratch(scratch, train_tokenizer(write_corpus(folder).vocabulary))
        validation.write_text("".join(_first(folder / name) for name in (HELD_OUT_FILE, HELD_OUT_TEXT_FILE)), "utf-8")
    job = TuningJob(
        checkpoint=scratch,
        target=target,
        data=(folder / TRAIN_FILE,),
        settings=settings,
        validation=(validation,),
        log_every=50,
        resume=resume,
        overwrite=True,
    )
    tune(job)
    card = target / CARD_FILE
    _, _, rest = card.read_text("utf-8").partition("\n\n")
    card.write_text(f"# {target.name}\n\n{ABOUT}\n\n{rest}", "utf-8")
    (target / PROMPTS_FILE).write_text(json.dumps(PROMPTS, indent=2) + "\n", "utf-8")


def _first(file: Path) -> str:
    return "".join(line + "\n" for line in file.read_text("utf-8").split("\n")[:_VALIDATION] if line)


if __name__ == "__main__":
    main()
