"""A tokenizer from `tokenizer.json` and its chat template, without transformers.

Has the few methods of a Hugging Face tokenizer that ktc's engine uses, with the same results: ids of plain
text, incremental decoding, and chats whose user text can never become a control token (failure T3).
Templates run in jinja2's sandbox. Tokenizers that transformers builds itself rather than reads
(`tokenizer_class` of a model family) are refused here, and the caller falls back to transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktc.errors import BundleError, KtcError, UsageError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

READ_AS_THEY_ARE = ("TokenizersBackend", "PreTrainedTokenizerFast", "")
"""Tokenizer classes whose ids are those of tokenizer.json alone."""
_START, _END = "\U000f0000", "\U000f0001"  # private use: mark control tokens that came from outside the template


class NeedsTransformers(KtcError):
    """This tokenizer's ids depend on transformers' code."""


class NativeTokenizer:
    """Tokenizer of a bundle's `model/` folder."""

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            NeedsTransformers: no tokenizer.json, or a class with rules of its own. KtcError: it is damaged.
        """
        from tokenizers import Tokenizer

        config_file, file = folder / "tokenizer_config.json", folder / "tokenizer.json"
        self.settings: dict[str, Any] = json.loads(config_file.read_text()) if config_file.exists() else {}
        kind = str(self.settings.get("tokenizer_class", "")).removesuffix("Fast") or ""
        kinds = {k.removesuffix("Fast") for k in READ_AS_THEY_ARE}
        if not file.exists() or kind not in kinds or self._adds_tokens():
            raise NeedsTransformers(f"the tokenizer in {folder} needs transformers")
        try:
            self.core: Tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises nothing more special
            raise BundleError(f"the tokenizer in {folder} cannot be loaded: {error}") from error
        self.added = {t.content: bool(t.special) for t in self.core.get_added_tokens_decoder().values()}
        self.chat_template = self._template(folder)
        self.eos_token_id = self._id("eos_token")
        self.bos_token_id = self._id("bos_token")

    def _adds_tokens(self) -> bool:
        """Settings by which transformers changes what tokenizer.json does."""
        return any(self.settings.get(k) is not None for k in ("add_bos_token", "add_eos_token", "add_prefix_space"))

    def _template(self, folder: Path) -> str | None:
        file = folder / "chat_template.jinja"
        if file.exists():
            return file.read_text()
        found = self.settings.get("chat_template")
        if isinstance(found, list):
            found = next((t["template"] for t in found if t.get("name") == "default"), None)
        return found if isinstance(found, str) else None

    def _token(self, key: str) -> str | None:
        value = self.settings.get(key)
        return value.get("content") if isinstance(value, dict) else value

    def _id(self, key: str) -> int | None:
        token = self._token(key)
        return None if token is None else self.core.token_to_id(token)

    def __call__(self, text: str, add_special_tokens: bool = True, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": self.core.encode(text, add_special_tokens=add_special_tokens).ids}

    def decode(
        self, ids: Sequence[int], skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = False
    ) -> str:
        return str(self.core.decode(list(ids), skip_special_tokens=skip_special_tokens))

    # ---- chats --------------------------------------------------------------------------------
    def apply_chat_template(
        self,
        messages: list[dict[str, str]],
        add_generation_prompt: bool = True,
        tokenize: bool = True,
        return_dict: bool = False,
        sanitize_control_tokens: bool = True,
    ) -> list[int]:
        """Ids of a chat. Control tokens in the messages are encoded as the plain text that they are.

        Raises:
            KtcError: the template refused the messages; ValueError: a control token cannot be told from text.
        """
        if self.chat_template is None:
            raise UsageError("this tokenizer has no chat template")
        environment = _environment()
        tokens = {k: self._token(k) for k in ("bos_token", "eos_token", "pad_token", "unk_token")}
        control = _any_of(self._control_tokens(environment))
        text = environment.from_string(self.chat_template).render(
            messages=[{k: _mark(v, control) for k, v in message.items()} for message in messages],
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **{k: v for k, v in tokens.items() if v is not None},
        )
        # Text, marked token, text, ...; a marker that the template's string methods separated is dropped.
        pieces = re.split(f"{_START}({_any_of(self.added)}){_END}|[{_START}{_END}]", text)
        ids: list[int] = list(self.core.encode(pieces[0], add_special_tokens=False).ids)
        for index, piece in enumerate(pieces[1:], 1):
            if piece:
                ids += self._piece(piece, as_text=index % 2 == 1)
        return ids

    def _control_tokens(self, environment: Any) -> list[str]:
        """Special tokens, and added tokens that the template itself writes (white space is ordinary text)."""
        from jinja2 import nodes

        tree = environment.parse(self.chat_template)
        literals = {node.data for node in tree.find_all(nodes.TemplateData)}
        literals |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
        written = "\0".join(literals)
        return [t for t, special in self.added.items() if special or (t in written and not t.isspace())]

    def _piece(self, piece: str, as_text: bool) -> list[int]:
        """A piece from the middle of a text: encoded after a newline, so that nothing is added at its beginning."""
        encode = self._encode_as_text if as_text else self._encode
        newline, ids = self._encode("\n"), encode("\n" + piece)
        ids = ids[len(newline) :] if ids[: len(newline)] == newline else encode(piece)
        if as_text and self.core.token_to_id(piece) in ids:
            raise ValueError(f"cannot encode {piece!r} as text: the tokenizer makes the control token of it")
        return ids

    def _encode(self, text: str) -> list[int]:
        return list(self.core.encode(text, add_special_tokens=False).ids)

    def _encode_as_text(self, text: str) -> list[int]:
        """The tokenizer's pipeline without its added tokens."""
        if self.core.normalizer is not None:
            text = self.core.normalizer.normalize_str(text)
        parts = [text]
        if self.core.pre_tokenizer is not None:
            parts = [part for part, _ in self.core.pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for part in parts for token in self.core.model.tokenize(part)]


def _any_of(tokens: Iterable[str]) -> str:
    """A pattern that matches any of `tokens`, longer ones first."""
    return "|".join(map(re.escape, sorted(filter(None, tokens), key=len, reverse=True))) or "(?!)"


def _mark(value: Any, pattern: str) -> Any:
    if not isinstance(value, str):
        return value
    clean = value.replace(_START, "").replace(_END, "")
    return re.sub(pattern, lambda m: f"{_START}{m[0]}{_END}", clean)


def _environment() -> Any:
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import Scope
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` blocks only mark text for training; here they are their contents."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = lambda x, ensure_ascii=False, indent=None, separators=None, sort_keys=False: (
        json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    )
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def load_tokenizer(folder: Path) -> Any:
    """The native tokenizer where its ids are certain to be right, else transformers' (slower to start)."""
    try:
        return NativeTokenizer(folder)
    except NeedsTransformers:
        from ktc.engine.chat import load_tokenizer as with_transformers

        return with_transformers(folder)
