"""The language of a text is known from its characters."""

from indexing.tokenization.language import language_of


def test_the_language_is_detected_from_characters() -> None:
    assert language_of(["When did the oil crisis begin?", "谁?"]) == "en"
    assert language_of(["黑豹队的防守丢了多少分？", "Windows 2000 的发行日期"]) == "zh"
    assert language_of([]) == "en"
