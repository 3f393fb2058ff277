"""The two places a conversation is held in: a terminal with a person, and a pipe with a program."""

from __future__ import annotations

import io
import select
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from octavo.cli.chat_answers import Numbers

PASTE_PAUSE = 0.04
"""Seconds without a further line after which a paste is over: a terminal delivers one within a few."""

# What a model writes is shown, not obeyed: control characters, which begin escape sequences, become pictures.
_VISIBLE: dict[int, int | None] = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n"}
_VISIBLE |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD) | {0x0D: None}


def harmless(text: str) -> str:
    """`text` with every control character but tab and newline made visible; carriage returns go."""
    return text.translate(_VISIBLE)


class Room(Protocol):
    """Where turns come from and answers go."""

    takes_commands: bool

    def turns(self) -> Iterator[str]:
        """What is said to the model, one turn after the other, until there is no more."""

    def piece(self, text: str) -> None:
        """The next part of an answer."""

    def end_of_answer(self) -> None: ...

    def remark(self, note: str) -> None:
        """Something to know about the answer that has just ended."""

    def show(self, numbers: Numbers) -> None:
        """What the answer cost."""

    def say(self, text: str) -> None:
        """A word of the program itself, which no pipe should carry."""

    def complain(self, sentence: str) -> None: ...


class PipeRoom:
    """Each line of standard input is a turn; answers are plain text on standard output."""

    takes_commands = False

    def __init__(self) -> None:
        self._shown = sys.stdout.isatty()  # a question came through a pipe, and a person reads the answer
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(encoding="utf-8", errors="replace")

    def turns(self) -> Iterator[str]:
        for line in sys.stdin:
            if text := line.strip():
                yield text

    def piece(self, text: str) -> None:
        sys.stdout.write(harmless(text) if self._shown else text)
        sys.stdout.flush()

    def end_of_answer(self) -> None:
        sys.stdout.write("\n")
        sys.stdout.flush()

    def remark(self, note: str) -> None:
        print(f"octavo: {note}", file=sys.stderr)

    def show(self, numbers: Numbers) -> None:
        """Nothing: a program reads this."""

    def say(self, text: str) -> None:
        """Nothing: a program reads this."""

    def complain(self, sentence: str) -> None:
        print(f"octavo: error: {sentence}", file=sys.stderr)


class TerminalRoom:
    """A person: line editing and history of lines, colours, Ctrl-C at the prompt, pastes of many lines."""

    takes_commands = True

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(highlight=False)
        self._edits_lines = _readline_is_there()
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")

    def turns(self) -> Iterator[str]:
        while True:
            try:
                text = self._read_turn().strip()
            except KeyboardInterrupt:
                self._console.print("\n(Ctrl-D leaves)", style="dim")
                continue
            except EOFError:
                self._console.print()
                return
            if text:
                yield text

    def _read_turn(self) -> str:
        """One line, or every line of a paste: those there before anybody could have typed them."""
        lines = [input(self._prompt())]
        while select.select([sys.stdin], [], [], PASTE_PAUSE)[0]:
            try:
                lines.append(input())
            except EOFError:
                break
        return "\n".join(lines)

    def _prompt(self) -> str:
        if self._console.no_color or not self._console.is_terminal:
            return "> "
        bold, plain = "\x1b[1;32m", "\x1b[0m"
        # readline must be told which characters take no room, or it breaks long lines in the wrong place.
        return f"\x01{bold}\x02> \x01{plain}\x02" if self._edits_lines else f"{bold}> {plain}"

    def piece(self, text: str) -> None:
        self._console.out(harmless(text), end="", highlight=False)

    def end_of_answer(self) -> None:
        self._console.print()

    def remark(self, note: str) -> None:
        self._console.print(f"({note})", style="yellow", markup=False)

    def show(self, numbers: Numbers) -> None:
        if line := numbers_line(numbers):
            self._console.print(line, style="dim")

    def say(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False, soft_wrap=True)

    def complain(self, sentence: str) -> None:
        self._console.print(sentence, style="red", markup=False, soft_wrap=True)


def numbers_line(numbers: Numbers) -> str:
    """For example "prompt 120 tokens (96 cached), answer 57, 38.2 tokens/s"; without what is unknown."""
    parts = []
    if numbers.prompt_tokens is not None:
        cached = f" ({numbers.cached_tokens:,} cached)" if numbers.cached_tokens else ""
        parts.append(f"prompt {numbers.prompt_tokens:,} tokens{cached}")
    if numbers.output_tokens is not None:
        parts.append(f"answer {numbers.output_tokens:,}")
    if numbers.tokens_per_second is not None:
        parts.append(f"{numbers.tokens_per_second:.1f} tokens/s")
    return ", ".join(parts)


def _readline_is_there() -> bool:
    try:
        import readline
    except ImportError:
        return False
    if "libedit" not in (readline.__doc__ or ""):
        # The terminal then says where a paste begins and ends, and its newlines are text, not Enter.
        readline.parse_and_bind("set enable-bracketed-paste on")
    return True
