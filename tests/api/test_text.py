"""Untrusted text, as it is shown."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticctl.api.text import join_some, visible, visible_line

HOSTILE = "a\x1b]0;owned\x07b\x1b[2Jc\rd\x9be\u202ef\x7fg\x00"


def harmless(text: str) -> bool:
    return not any((ord(char) < 32 and char not in "\t\n") or 127 <= ord(char) < 160 for char in text)


def test_the_first_of_many_names_are_listed_and_the_others_counted() -> None:
    assert join_some(["a"], "worker") == "a"
    assert join_some(["a", "b", "c"], "worker") == "a, b, c"
    assert join_some(["a", "b", "c", "d"], "worker") == "a, b, c and 1 more worker"
    assert join_some(["a", "b", "c", "d", "e"], "worker") == "a, b, c and 2 more workers"


def test_control_characters_are_shown() -> None:
    assert visible(HOSTILE) == ("a\\u001b]0;owned\\u0007b\\u001b[2Jc\\u000dd\\u009be\\u202ef\\u007fg\\u0000")


def test_text_of_any_language_stays() -> None:
    for text in ("plain", "tab\tand\nline", "naïve - 日本語 - \u0627\u0644\u0639 - 👩\u200d🔬", "a\u00a0b"):
        assert visible(text) == visible_line(text) == text


@given(st.text())
def test_no_control_character_is_left(text: str) -> None:
    assert harmless(visible(text))
    assert visible(visible(text)) == visible(text)


@given(st.text(st.characters(min_codepoint=0, max_codepoint=0x2070)))
def test_json_stays_the_same_json(text: str) -> None:
    assert json.loads(visible(json.dumps([text], ensure_ascii=False))) == [text]


def test_colours_pass_in_logs_and_end_with_the_line() -> None:
    assert visible_line("\x1b[1;31mred\x1b[0m") == "\x1b[1;31mred\x1b[0m\x1b[0m"
    assert visible_line("\x1b[38;2;1;2;3mx\x1b[2K") == "\x1b[38;2;1;2;3mx\\u001b[2K\x1b[0m"
    assert visible_line("50%\r100%\x1b[A") == "50%\\u000d100%\\u001b[A"
    assert visible_line("from Windows\r") == "from Windows"
    for sequence in ("\x1b]8;;http://x\x07", "\x1bP1$r\x1b\\", "\x1b[31;1H", "\x1b[?25l", "\x1bc", "\x9b31m"):
        assert harmless(visible_line(sequence)), sequence


@given(st.lists(st.sampled_from(["\x1b", "[", "0", ";", "m", "K", "\r", "x", "\x9b", "]"])).map("".join))
def test_only_whole_colour_codes_pass(text: str) -> None:
    left = visible_line(text)
    while "\x1b[" in left:
        before, _, after = left.partition("\x1b[")
        codes, end, rest = after.partition("m")
        assert end
        assert not codes.strip("0123456789;:")
        left = before + rest
    assert harmless(left)


@pytest.mark.parametrize("char", "\u200e\u200f\u061c\u200b\u2060\u206a\ufeff\xad\U000e0041\ud800\ufff9\u180e")
def test_invisible_characters_are_shown_and_stay_json(char: str) -> None:
    """Marks that turn text around, blanks without width, letters of tags, and halves that no terminal can print."""
    assert char not in visible(f"a{char}b")
    assert json.loads(f'"{visible(f"a{char}b")}"') == f"a{char}b"
    visible_line(f"a{char}b").encode()


def test_joiners_of_scripts_and_emoji_stay() -> None:
    for text in ("\u0645\u06cc\u200c\u062e\u0648", "\U0001f469\u200d\U0001f467"):
        assert visible(text) == text
