"""The table at the end of a run, with `rich` and without."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence

import pytest

from strategies import Decision
from strategies.report import print_decisions

DECISIONS = (
    Decision(3.0, 200, "EarlyStop", "stop", "loss flat for 3 checks"),
    Decision(1.0, 0, "LayerwiseLRDecay", "set rates", "3 levels from [embed] (x0.25) to head"),
    Decision(2.0, 200, "Checkpoint", "save", "12 minutes :x: since the last"),
)
IN_ORDER = ("set rates", "save", "stop")


@pytest.fixture
def without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)


def printed(decisions: Sequence[Decision]) -> str:
    file = io.StringIO()
    print_decisions(iter(decisions), file)
    return file.getvalue()


def positions(text: str, parts: Sequence[str]) -> list[int]:
    found = [text.find(part) for part in parts]
    assert -1 not in found, (parts, text)
    return found


@pytest.mark.usefixtures("without_rich")
def test_plain_table() -> None:
    assert printed(DECISIONS) == (
        "step  callback          action     reason\n"
        "0     LayerwiseLRDecay  set rates  3 levels from [embed] (x0.25) to head\n"
        "200   Checkpoint        save       12 minutes :x: since the last\n"
        "200   EarlyStop         stop       loss flat for 3 checks\n"
    )


@pytest.mark.usefixtures("without_rich")
def test_plain_table_says_nothing_when_there_is_nothing() -> None:
    assert printed([]) == ""


@pytest.mark.usefixtures("without_rich")
def test_standard_output_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    print_decisions(DECISIONS)
    assert capsys.readouterr().out == printed(DECISIONS)


class TestWithRich:
    @pytest.fixture(autouse=True)
    def _needs_rich(self) -> None:
        pytest.importorskip("rich")

    def test_is_used(self) -> None:
        text = printed(DECISIONS)
        assert "Decisions" in text.splitlines()[0]
        assert "│" in text

    def test_each_decision_takes_one_line_in_order(self) -> None:
        lines = [line for line in printed(DECISIONS).splitlines() if line.startswith("│")]
        assert len(lines) == len(DECISIONS)
        for line, action in zip(lines, IN_ORDER, strict=True):
            assert action in line

    def test_every_value_is_shown_as_it_is(self) -> None:
        # rich would take "[embed]" for markup and ":x:" for an emoji.
        text = printed(DECISIONS)
        for d in DECISIONS:
            positions(text, (str(d.step), d.callback, d.action, d.reason))

    def test_says_nothing_when_there_is_nothing(self) -> None:
        assert printed([]) == ""

    def test_no_colour_codes_off_a_terminal(self) -> None:
        assert "\x1b" not in printed(DECISIONS)

    def test_a_sentence_fits_one_line_off_a_terminal(self) -> None:
        reason = "12 levels from embed.weight (x0.0317) to classifier.weight (x1)"
        text = printed([Decision(0.0, 0, "LayerwiseLRDecay", "set rates", reason)])
        assert reason in text

    def test_a_long_reason_loses_no_word(self) -> None:
        words = [f"word{i}" for i in range(60)]
        text = printed([Decision(0.0, 1, "EarlyStop", "stop", " ".join(words))])
        assert positions(text, words) == sorted(positions(text, words))

    def test_standard_output_is_the_default(self, capsys: pytest.CaptureFixture[str]) -> None:
        print_decisions(DECISIONS)
        assert capsys.readouterr().out == printed(DECISIONS)


@pytest.mark.usefixtures("without_rich")
def test_steps_count_before_a_clock_that_was_set_back() -> None:
    text = printed(
        [
            Decision(900.0, 10, "EarlyStop", "wait", "before the clock was set back"),
            Decision(100.0, 20, "EarlyStop", "stop", "after it"),
        ]
    )
    assert text.index("wait") < text.index("stop")


@pytest.mark.parametrize("missing", [True, False])
def test_the_users_order_of_decisions_does_not_matter(
    missing: bool, request: pytest.FixtureRequest
) -> None:
    if missing:
        request.getfixturevalue("without_rich")
    assert printed(DECISIONS) == printed(DECISIONS[::-1])


def test_output_that_cannot_be_written_only_warns() -> None:
    closed = io.StringIO()
    closed.close()
    with pytest.warns(UserWarning, match="decision table could not be printed"):
        print_decisions([Decision(0.0, 1, "A", "did", "because")], file=closed)


def test_a_console_that_cannot_encode_a_name_gets_ascii() -> None:
    raw = io.BytesIO()
    narrow = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    print_decisions([Decision(0.0, 1, "A", "did", "\u0441\u043b\u043e\u0439 layer")], file=narrow)
    assert b"???? layer" in raw.getvalue()
