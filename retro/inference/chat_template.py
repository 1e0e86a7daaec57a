"""Write conversations as tokens with a Jinja chat template, and mark the tokens of answers.

    messages ─ a mark for each ─ template ─ cut at the marks ─┬ words of the template: control tokens and text
                                                              ├ messages of system and user: text
                                                              └ messages of the assistant, and the ends of its turns: answers

The template gets marks instead of the messages, so its words can be distinguished from theirs: `<|im_end|>` in a
message is text, not the control token. The text that the template writes after the last answer ends a turn. A blank
before an answer belongs to the answer, as before any word.

Without a template, plain words are used, for models without control tokens. The end of the document then ends a turn:

    …system…⏎⏎User: …⏎Assistant: …</s>⏎User: …⏎Assistant: …</s>          in Chinese 用户：…⏎助手：…</s>
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from indexing.store.errors import InputError
from indexing.tokenization.backends import read_object
from indexing.tokenization.language import Language, language_of
from indexing.tokenization.tokenizer import Tokenizer
from retro.inference.jinja_process import TemplateError, render

_PLAIN = """\
{% for message in messages %}
{% if message.role == 'system' %}
{{ message.content }}

{% elif message.role == 'user' %}
USER{{ message.content }}
{% else %}
ASSISTANT{{ message.content }}{{ eos_token }}
{% endif %}
{% endfor %}
"""
PLAIN: dict[Language, str] = {
    "en": _PLAIN.replace("USER", "User: ").replace("ASSISTANT", "Assistant: "),
    "zh": _PLAIN.replace("USER", "用户：").replace("ASSISTANT", "助手："),
}

# Characters of Unicode's private use area. They stand for messages, and for the beginning and the end of a document if
# the tokenizer has no names for these.
_MARK, _MARKS = "\ue000{}\ue001", re.compile("\ue000(\\d+)\ue001")
_BEGIN, _END = "\ue002", "\ue003"
_STORED = "the checkpoint's chat template"

# Roles of the messages before an answer; a template must write the first one.
_SHAPES = (("user",), ("system", "user"), ("user", "assistant", "user"), ("system", "user", "assistant", "user"))


class Message(NamedTuple):
    """A message of `system`, `user` or `assistant`."""

    role: str
    content: str


Conversation = tuple[Message, ...]
"""Messages in order; the last one is the assistant's."""


class _Refused(InputError):
    """A conversation that a template does not accept."""


@dataclass(frozen=True)
class Written:
    """A conversation as tokens.

    Attributes:
        tokens: [t] int64, from the beginning of the document to its end.
        is_answer: [t] bool, True for messages of the assistant and the ends of its turns.
    """

    tokens: np.ndarray
    is_answer: np.ndarray


class _TextSpan(NamedTuple):
    text: str
    of_template: bool
    is_answer: bool


@dataclass(frozen=True)
class ChatTemplate:
    """Writes conversations as tokens.

    Attributes:
        tokenizer: the model's.
        source: the Jinja template; empty = plain words.
        language: of the plain words; `auto` = that of each conversation.
        option: the name of the template in errors.
    """

    tokenizer: Tokenizer
    source: str = ""
    language: Language | Literal["auto"] = "auto"
    option: str = "finetune.template"

    def write(self, conversation: Conversation) -> Written:
        """Write a conversation that ends with the assistant's message.

        Raises:
            InputError: the template rejects it, or does not write every message exactly once.
        """
        tokens, answers = [self.tokenizer.bos_id], [False]
        for is_answer, group in groupby(self._spans(conversation), key=lambda span: span.is_answer):
            encoded = list(self._encoded(list(group)))
            if len(tokens) == 1 and self._begins_itself(encoded):
                tokens, answers = [], []
            tokens += encoded
            answers += [is_answer] * len(encoded)
        if tokens[-1] != self.tokenizer.eos_id:
            tokens, answers = [*tokens, self.tokenizer.eos_id], [*answers, True]
        return Written(np.array(tokens, dtype=np.int64), np.array(answers))

    def _begins_itself(self, first: list[int]) -> bool:
        """True if the template begins the document: with BOS, or with any control token for a model that has no BOS."""
        begins = {self.tokenizer.bos_id} if self.tokenizer.has_bos else {*self._control_tokens.values()}
        return not begins.isdisjoint(first[:1])

    @cached_property
    def end_of_turn(self) -> int:
        """The token with which the assistant's turn ends: a control token of the template, or the end of the
        document."""
        written = self.write((Message("user", "x"), Message("assistant", "x")))
        control = {*self._control_tokens.values()}
        answer = np.flatnonzero(written.is_answer)
        return next(token for token in written.tokens[answer].tolist() if token in control)

    def prompt(self, messages: Sequence[Message]) -> np.ndarray:
        """The tokens [t] int64 after which the assistant's answer starts."""
        written = self.write((*messages, Message("assistant", "x")))
        last = np.flatnonzero(np.diff(written.is_answer.astype(np.int8)) == 1)[-1]
        return written.tokens[: last + 1]

    def check(self) -> None:
        """Write conversations of several shapes, so that a broken template is found before it is needed.

        Raises:
            InputError: the template cannot be rendered, or refuses a single question. It may refuse other shapes.
        """
        for roles in _SHAPES:
            try:
                self.prompt([Message(role, "x") for role in roles])
            except _Refused:
                if roles == _SHAPES[0]:
                    raise

    def _spans(self, conversation: Conversation) -> Iterator[_TextSpan]:
        """Messages, and the template's words between them."""
        words = _MARKS.split(self._render(conversation))  # words, number of a message, words, number …, words
        if words[1::2] != [str(number) for number in range(len(conversation))]:
            raise _Refused(f"{self.option} leaves out a message, or writes one twice or in another order.")
        ending, answered = words[-1].rstrip(), False
        for between, message in zip(words[:-1:2], conversation, strict=True):
            if answered and between.startswith(ending):
                yield _TextSpan(ending, True, True)
                between = between.removeprefix(ending)
            answered = message.role == "assistant"
            before = between.rstrip(" ") if answered else between
            yield _TextSpan(before, True, False)
            yield _TextSpan(between[len(before) :] + message.content, False, answered)
        yield _TextSpan(ending, True, True)

    def _render(self, conversation: Conversation) -> str:
        marked = [
            {"role": message.role, "content": _MARK.format(number)} for number, message in enumerate(conversation)
        ]
        language = (
            self.language if self.language != "auto" else language_of([message.content for message in conversation])
        )
        names = {token: name for name, token in self._control_tokens.items()}
        begin, end = names[self.tokenizer.bos_id], names[self.tokenizer.eos_id]
        variables = {"messages": marked, "bos_token": begin, "eos_token": end, "add_generation_prompt": False}
        try:
            return render(self.source or PLAIN[language], variables)
        except TemplateError as error:
            roles = ", ".join(message.role for message in conversation[:8]) + ", …" * (len(conversation) > 8)
            kind, verb = (_Refused, "refuses") if error.refused else (InputError, "fails for")
            raise kind(f"{self.option} {verb} messages of {roles}: {error}.") from error

    def _encoded(self, spans: Sequence[_TextSpan]) -> Iterator[int]:
        """Encode spans; adjacent text is encoded together. Only the template's words can contain control tokens."""
        text = ""
        for span in spans:
            for part in self._control.split(span.text) if span.of_template else [span.text]:
                if span.of_template and part in self._control_tokens:
                    yield from self.tokenizer.encode(text).tolist() if text else ()
                    yield self._control_tokens[part]
                    text = ""
                else:
                    text += part
        yield from self.tokenizer.encode(text).tolist() if text else ()

    @cached_property
    def _control_tokens(self) -> dict[str, int]:
        begin_and_end = {_BEGIN: self.tokenizer.bos_id, _END: self.tokenizer.eos_id}
        return {**begin_and_end, **self.tokenizer.control_tokens}  # of two names of a token the later one is used

    @cached_property
    def _control(self) -> re.Pattern[str]:
        longest_first = sorted(self._control_tokens, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first))})")


def template_of(tokenizer: Tokenizer, settings: Mapping[str, Any]) -> ChatTemplate:
    """The template of a model that was fine-tuned on instructions, or imported with a template.

    Raises:
        InputError: the checkpoint has no template.
    """
    if template := stored_template(tokenizer, settings):
        return template
    raise InputError(
        "the checkpoint has no chat template: the model was neither fine-tuned on instructions (`retro finetune`, with "
        "finetune.format = 'instructions') nor imported from a folder with a chat_template."
    )


def stored_template(tokenizer: Tokenizer, settings: Mapping[str, Any]) -> ChatTemplate | None:
    """As `template_of`; None if the checkpoint has no template.

    Args:
        tokenizer: the model's.
        settings: those of its checkpoint. The sections `finetune` and `imported` contain the text of a template.
    """
    finetuned, imported = settings.get("finetune"), settings.get("imported", {}).get("chat_template")
    if finetuned is not None and finetuned["format"] == "instructions":
        return ChatTemplate(tokenizer, finetuned["template"], finetuned["language"], _STORED)
    return ChatTemplate(tokenizer, imported, option=_STORED) if imported else None


def chosen_template(tokenizer: Tokenizer, settings: Mapping[str, Any], path: str) -> ChatTemplate | None:
    """The template at a path, the option `chat_template`, or else the checkpoint's; None if it has none.

    Args:
        tokenizer: the model's.
        settings: those of its checkpoint.
        path: a Jinja file, or a folder of a tokenizer; empty: none.

    Raises:
        InputError: there is no template at the path, or it cannot write conversations.
    """
    if path:
        option = f"chat_template = {path!r}"
        template: ChatTemplate | None = ChatTemplate(tokenizer, read_template(path, "chat_template"), option=option)
    else:
        template = stored_template(tokenizer, settings)
    if template is not None:
        template.check()
    return template


def read_template(path: str, option: str = "finetune.template") -> str:
    """The Jinja template that an option names; empty if it is empty.

    Raises:
        InputError: the file or folder has no template.
    """
    if not path:
        return ""
    location = Path(path).expanduser()
    if location.is_file():
        return _read(location)
    if template := template_in(location):
        return template
    raise InputError(
        f"{option} = {path!r}: name a Jinja file, or the folder of a tokenizer with a chat_template.jinja or with "
        'a "chat_template" in tokenizer_config.json.'
    )


def template_in(folder: Path) -> str:
    """The chat template in the folder of a Hugging Face tokenizer; empty if it has none."""
    file, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if file.is_file():
        return _read(file)
    stored = read_object(config).get("chat_template") if config.is_file() else None
    if isinstance(stored, list):  # several by name
        stored = {entry.get("name"): entry.get("template") for entry in stored if isinstance(entry, dict)}.get(
            "default"
        )
    return stored if isinstance(stored, str) else ""


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is not UTF-8 (byte {error.start:,}). A chat template is a text in UTF-8.") from error
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}.") from error
