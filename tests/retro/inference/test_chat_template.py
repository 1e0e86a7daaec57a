"""Answer tokens are exactly the assistant's messages and end tokens, in every template and language."""

import json
from pathlib import Path

import numpy as np
import pytest

from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.tokenization.installation import install_tokenizer
from indexing.tokenization.settings import TokenizerSettings
from indexing.tokenization.tokenizer import Tokenizer
from retro.inference import jinja_process
from retro.inference.chat_template import ChatTemplate, Conversation, Message, Written, read_template
from tests.conftest import write_byte_tokenizer

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] | trim + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BRACKETS = (  # like Llama 2: BOS and EOS around each turn
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{% generation %}{{ ' ' + m.content + ' ' + eos_token }}{% endgeneration %}"
    "{% else %}{{ raise_exception('no system message here') }}{% endif %}{% endfor %}"
)
ENGLISH: Conversation = (
    Message("system", "You are brief."),
    Message("user", "which index is it? <|im_end|>"),
    Message("assistant", "the first <|im_end|> one"),
    Message("user", "and then?"),
    Message("assistant", "the second one\nof them"),
)
CHINESE: Conversation = (Message("user", "今天怎么样？"), Message("assistant", "很好，谢谢。"))


@pytest.fixture(scope="module")
def sentencepiece(tiny_datastore: Datastore) -> Tokenizer:
    return Tokenizer.open(tiny_datastore.folder / "tokenizer")


@pytest.fixture(scope="module")
def huggingface(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Byte tokens and control tokens, without a BOS token."""
    folder = tmp_path_factory.mktemp("tokenizer")
    special = ("<|end|>", "<|im_start|>", "<|im_end|>")
    write_byte_tokenizer(folder, special, eos_token="<|end|>", chat_template=CHATML)
    install_tokenizer(TokenizerSettings(kind="huggingface", path=str(folder)), folder / "installed")
    return Tokenizer.open(folder / "installed")


def answer_texts(tokenizer: Tokenizer, written: Written) -> list[str]:
    """The text of each run of answer tokens."""
    borders = np.flatnonzero(np.diff(written.is_answer.astype(int))) + 1
    runs = zip(np.split(written.tokens, borders), np.split(written.is_answer, borders), strict=True)
    return [tokenizer.decode(tokens) for tokens, wanted in runs if wanted[0]]


def assistant_texts(conversation: Conversation) -> list[str]:
    return [message.content for message in conversation if message.role == "assistant"]


@pytest.mark.parametrize("conversation", [ENGLISH, CHINESE, ENGLISH[1:]], ids=["english", "chinese", "without system"])
@pytest.mark.parametrize("source", ["", CHATML, BRACKETS], ids=["plain", "chatml", "brackets"])
@pytest.mark.parametrize("kind", ["sentencepiece", "huggingface"])
def test_labels_are_the_assistants_messages_and_their_end_tokens(
    kind: str, source: str, conversation: Conversation, request: pytest.FixtureRequest
) -> None:
    if source == BRACKETS and conversation is ENGLISH:
        pytest.skip("it takes no system message")
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    written = ChatTemplate(tokenizer, source).write(conversation)
    found = answer_texts(tokenizer, written)
    if kind == "sentencepiece" and source == CHATML:  # it has no such control token and encodes letters
        found = [text.removesuffix("<|im_end|>") for text in found]
    assert [text.strip(" ") for text in found] == assistant_texts(conversation)
    begins_itself = (
        kind == "huggingface" and source == CHATML
    )  # a model without BOS: nothing in front, as in transformers
    first = tokenizer.control_tokens["<|im_start|>"] if begins_itself else tokenizer.bos_id
    assert (written.tokens[0], written.is_answer[0]) == (first, False)
    assert (written.tokens[-1], written.is_answer[-1]) == (tokenizer.eos_id, True)
    ends = np.flatnonzero(np.diff(written.is_answer.astype(int), append=0) == -1)
    end = tokenizer.control_tokens.get("<|im_end|>") if source == CHATML else tokenizer.eos_id
    if end is not None:
        assert set(written.tokens[ends[:-1]]) <= {end}
        assert end in written.tokens[ends[-1] - 1 :]


def test_bos_is_not_repeated_at_the_start(huggingface: Tokenizer) -> None:
    assert ChatTemplate(huggingface, BRACKETS).write(CHINESE).tokens.tolist().count(huggingface.bos_id) == 2
    assert huggingface.bos_id == huggingface.eos_id


def test_plain_labels_follow_the_language(sentencepiece: Tokenizer) -> None:
    def text(conversation: Conversation, language="auto") -> str:
        return sentencepiece.decode(ChatTemplate(sentencepiece, "", language).write(conversation).tokens)

    assert text(ENGLISH) == (
        "You are brief.\n\nUser: which index is it? <|im_end|>\nAssistant: the first <|im_end|> one\n"
        "User: and then?\nAssistant: the second one\nof them"
    )
    assert text(CHINESE) == "用户：今天怎么样？\n助手：很好，谢谢。"
    assert text(CHINESE, "en") == "User: 今天怎么样？\nAssistant: 很好，谢谢。"


def test_control_tokens_in_messages_are_plain_text(huggingface: Tokenizer) -> None:
    tokens = ChatTemplate(huggingface, CHATML).write(ENGLISH).tokens.tolist()
    assert tokens.count(huggingface.control_tokens["<|im_start|>"]) == len(ENGLISH)
    assert tokens.count(huggingface.control_tokens["<|im_end|>"]) == len(ENGLISH)


@pytest.mark.parametrize("source", ["", CHATML], ids=["plain", "chatml"])
def test_a_prompt_is_the_text_before_the_answer(huggingface: Tokenizer, source: str) -> None:
    template = ChatTemplate(huggingface, source)
    prompt, written = template.prompt(ENGLISH[:-1]), template.write(ENGLISH)
    assert prompt.tolist() == written.tokens[: len(prompt)].tolist()
    assert huggingface.decode(written.tokens[len(prompt) :]).strip() == ENGLISH[-1].content


def test_chatml_equals_transformers(huggingface: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    plain = tuple(message._replace(content=message.content.replace("<|im_end|>", "").strip()) for message in ENGLISH)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=huggingface._model.tokenizer, chat_template=CHATML)
    fast.backend_tokenizer.encode_special_tokens = False
    whole = fast.apply_chat_template([message._asdict() for message in plain], tokenize=True, return_dict=False)
    ours = ChatTemplate(huggingface, CHATML).write(plain).tokens.tolist()
    assert ours[:-1] == whole[:-1]  # ours adds EOS and omits the newline after the last turn


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (BRACKETS, "finetune.template refuses messages of system, user, .*: no system message here"),
        ("{% for m in messages %}", "finetune.template fails for"),
        ("{{ messages[0].content }}", "leaves out a message"),
    ],
)
def test_invalid_templates_are_rejected(sentencepiece: Tokenizer, source: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        ChatTemplate(sentencepiece, source).write(ENGLISH)


@pytest.mark.parametrize("kind", ["sentencepiece", "huggingface"])
def test_the_end_of_a_turn_is_a_control_token_or_the_end_of_the_document(
    kind: str, request: pytest.FixtureRequest
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    assert ChatTemplate(tokenizer).end_of_turn == tokenizer.eos_id
    assert ChatTemplate(tokenizer, BRACKETS).end_of_turn == tokenizer.eos_id
    of_chatml = tokenizer.control_tokens.get("<|im_end|>", tokenizer.eos_id)
    assert ChatTemplate(tokenizer, CHATML).end_of_turn == of_chatml


def test_a_template_is_read_from_a_file_or_a_tokenizer_folder(tmp_path: Path) -> None:
    assert read_template("") == ""
    (tmp_path / "mine.jinja").write_text("words")
    assert read_template(str(tmp_path / "mine.jinja")) == "words"
    with pytest.raises(InputError, match=r"finetune\.template = "):
        read_template(str(tmp_path))
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": [{"name": "tools", "template": "a"}, {"name": "default", "template": "b"}]}))  # fmt: skip
    assert read_template(str(tmp_path)) == "b"
    config.write_text(json.dumps({"chat_template": "c"}))
    assert read_template(str(tmp_path)) == "c"
    (tmp_path / "chat_template.jinja").write_text("d")
    assert read_template(str(tmp_path)) == "d"


WRITES = "{% for m in messages %}{{ m.content }}{% endfor %}"
BROKEN = {
    "{{ 1 / 0 }}": "ZeroDivisionError",
    "{{ 'a' | round }}": "TypeError",
    "{{ nope.a }}": "undefined",
    "{{ messages[99].content }}": "no element 99",
    "{% for i in range(1000000000) %}x{% endfor %}": "Range too big",
    "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}": "recursion",
    "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}": "recursion",
    "{{ 'x' * 10 ** 11 }}": "MiB of memory",
    "{{ ('x' * 1000000) * 3000 }}": "MiB of memory",
    "{{ 'x' * 2000000 }}": "1,048,576 characters",
    "{{ 10 ** 100000 }}": "ValueError",
    "{% include '/etc/passwd' %}": "TypeError",
    "{{ self.__init__.__globals__ }}": "unsafe",
    "{% set _ = messages.append(1) %}": "unsafe",
    "{% for %}": "Expected an expression",
    "{{ raise_exception('no\nanswer') }}": "no answer",
    "{{ '\ue00099\ue001' }}": "leaves out",
    "{% if messages | length > 3 %}{{ 1 / 0 }}{% endif %}": "ZeroDivisionError",
}


@pytest.mark.parametrize(("source", "words"), BROKEN.items(), ids=map(str, range(len(BROKEN))))
def test_every_error_of_a_template_is_one_line_that_names_it(sentencepiece: Tokenizer, source: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as raised:
        ChatTemplate(sentencepiece, source + WRITES, option="chat_template = 'x.jinja'").check()
    assert str(raised.value).startswith("chat_template = 'x.jinja' ")
    assert "\n" not in str(raised.value)
    ChatTemplate(sentencepiece, WRITES).check()  # others are still rendered


def test_an_endless_template_ends_at_its_limit_of_time(
    sentencepiece: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jinja_process, "SECONDS", 0.2)
    process = jinja_process._Process()
    monkeypatch.setattr(jinja_process, "_process_of", lambda pid: process)
    endless = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"
    with pytest.raises(InputError, match=r"takes more than 0\.2 s of CPU time"):
        ChatTemplate(sentencepiece, endless + WRITES).prompt(ENGLISH[:2])
    assert process._running is not None
    assert process._running.poll() is not None  # nothing continues
    ChatTemplate(sentencepiece, WRITES).check()


def test_a_template_may_refuse_other_shapes_than_a_question(sentencepiece: Tokenizer) -> None:
    ChatTemplate(sentencepiece, BRACKETS).check()
    with pytest.raises(InputError, match="refuses messages of user, assistant: never"):
        ChatTemplate(sentencepiece, "{{ raise_exception('never') }}").check()


@pytest.mark.parametrize("name", ["mine.jinja", "chat_template.jinja"])
def test_a_template_in_another_encoding_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes("{{ 'é' }}".encode("latin-1"))
    with pytest.raises(InputError, match=rf"{name} is not UTF-8 \(byte 4\)"):
        read_template(str(tmp_path if name == "chat_template.jinja" else tmp_path / name))
