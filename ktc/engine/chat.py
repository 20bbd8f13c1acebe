"""Prompts to token ids: plain text, and chats through the tokenizer's template.

Templates run in transformers' jinja2 sandbox. Ids equal those of `tokenizer(text)` and of
`apply_chat_template`; what a user types into a chat never becomes a control token (failure T3).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ktc.errors import BundleError, KtcError, UsageError

Message = dict[str, str]


def require_tokenizer(folder: Path) -> None:
    """Say at once, before any weights are read, that there is no tokenizer.

    Raises:
        KtcError: `folder` (a bundle's `model/`) holds none; a BundleError if the manifest names one.
    """
    from ktc.bundle.model_files import TOKENIZER_FILES

    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        manifest = folder.parent / "manifest.json"
        listed = manifest.read_bytes() if manifest.is_file() else b""
        if any(f'"model/{name}"'.encode() in listed for name in TOKENIZER_FILES):
            raise BundleError(f"the tokenizer of {folder.parent} is missing from {folder}", "copy the bundle again")
        raise BundleError(
            f"no tokenizer in {folder}",
            "the checkpoint had none; put its tokenizer files beside config.json and compile again",
        )


def load_tokenizer(folder: Path) -> Any:
    """The Hugging Face tokenizer in `folder` (a bundle's `model/`). Never runs code from it, never goes online."""
    require_tokenizer(folder)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise BundleError(f"the tokenizer in {folder} cannot be loaded: {error}") from error


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Ids of a plain prompt, with the special tokens (BOS) that the tokenizer itself adds."""
    return [int(i) for i in tokenizer(text, verbose=False)["input_ids"]]  # generate.py checks the length


def has_chat_template(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def encode_chat(tokenizer: Any, messages: list[Message]) -> list[int]:
    """Ids of a chat up to and with the prompt for the assistant's next turn.

    Raises:
        UsageError: no template. KtcError: the template refused the messages.
    """
    if not has_chat_template(tokenizer):
        raise UsageError(
            "this tokenizer has no chat template", "leave out --chat and --system: the text is then completed"
        )
    try:
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False, sanitize_control_tokens=True
        )
    except Exception as error:  # jinja2 errors, and whatever a template raises itself
        raise KtcError(f"the chat template failed: {error}") from error
    return [int(i) for i in ids]
