"""The service of a server without requests."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from indexing.store.datastore import Datastore
from indexing.tokenization.tokenizer import Tokenizer
from retro.server.service import _chat_template


@pytest.mark.parametrize("source", ["{{ 1 / 0 }}", "{% for %}", "no messages"])
def test_a_checkpoints_broken_chat_template_is_reported_and_not_used(
    tiny_datastore: Datastore, caplog: pytest.LogCaptureFixture, source: str
) -> None:
    tokenizer = Tokenizer.open(tiny_datastore.folder / "tokenizer")
    checkpoint = SimpleNamespace(settings={"imported": {"chat_template": source}})
    model: Any = SimpleNamespace(tokenizer=tokenizer, checkpoint=checkpoint)
    with caplog.at_level(logging.WARNING):
        assert _chat_template(model, "") is None
    assert "/v1/chat/completions is not available: the checkpoint's chat template" in caplog.text
    checkpoint.settings["imported"]["chat_template"] = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert _chat_template(model, "") is not None
