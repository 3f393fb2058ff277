"""`octavo chat` with a scripted source, a scripted server, a real terminal and a real (tiny) engine."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

import pytest

from cli.chat_server import chat_server, event, stream
from octavo import LLM, SamplingParams
from octavo.cli import chat
from octavo.cli.chat_answers import ChatError, LocalSource, Message, Numbers
from octavo.cli.chat_remote import RemoteSource, server_sent_events
from octavo.cli.chat_terminal import harmless, numbers_line
from octavo.cli.main import main


class ScriptedAnswer:
    def __init__(self, pieces: Sequence[str | BaseException], finish_reason: str) -> None:
        self.finish_reason: str | None = None
        self.left = False
        self._pieces = pieces
        self._end = finish_reason

    def __iter__(self) -> Iterator[str]:
        for piece in self._pieces:
            if isinstance(piece, BaseException):
                raise piece
            yield piece
        self.finish_reason = self._end

    def numbers(self) -> Numbers:
        return Numbers()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.left = True


class ScriptedSource:
    name = "scripted"

    def __init__(self, *answers: Sequence[str | BaseException], finish_reason: str = "stop") -> None:
        self.asked: list[list[Message]] = []
        self.given: list[ScriptedAnswer] = []
        self._answers = iter(answers)
        self._end = finish_reason

    def ask(self, messages: Sequence[Message]) -> ScriptedAnswer:
        self.asked.append(list(messages))
        self.given.append(ScriptedAnswer(next(self._answers), self._end))
        return self.given[-1]

    def close(self) -> None:
        pass


class ScriptedRoom:
    def __init__(self, *turns: str, takes_commands: bool = True) -> None:
        self.takes_commands = takes_commands
        self.shown = ""
        self.remarks: list[str] = []
        self.complaints: list[str] = []
        self.words: list[str] = []
        self._turns = turns

    def turns(self) -> Iterator[str]:
        yield from self._turns

    def piece(self, text: str) -> None:
        self.shown += text

    def end_of_answer(self) -> None:
        self.shown += "|"

    def remark(self, note: str) -> None:
        self.remarks.append(note)

    def show(self, numbers: Numbers) -> None:
        pass

    def say(self, text: str) -> None:
        self.words.append(text)

    def complain(self, sentence: str) -> None:
        self.complaints.append(sentence)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def test_every_turn_carries_what_was_said_before() -> None:
    source, room = ScriptedSource(["He", "llo"], ["Yes"]), ScriptedRoom("hi", "really?")
    assert chat.Conversation(source, room).hold() == 0
    assert source.asked == [[user("hi")], [user("hi"), assistant("Hello"), user("really?")]]
    assert room.shown == "Hello|Yes|"


def test_the_system_message_comes_first_and_setting_it_begins_anew() -> None:
    source = ScriptedSource(["a"], ["b"])
    room = ScriptedRoom("hi", "/system Be brief.", "hi again", "/system")
    chat.Conversation(source, room, system="Be kind.").hold()
    assert source.asked[0][0] == {"role": "system", "content": "Be kind."}
    assert source.asked[1] == [{"role": "system", "content": "Be brief."}, user("hi again")]
    assert room.words[-1] == "Be brief."


def test_reset_forgets_and_help_and_mistyped_commands_are_not_sent() -> None:
    source = ScriptedSource(["a"], ["b"])
    room = ScriptedRoom("one", "/reset", "/help", "/hepl", "two")
    chat.Conversation(source, room).hold()
    assert source.asked[-1] == [user("two")]
    assert any("/reset" in words for words in room.words)
    assert room.complaints == ["There is no command /hepl; /help lists them."]


def test_in_a_pipe_a_line_that_begins_with_a_slash_is_a_turn() -> None:
    source = ScriptedSource(["a"])
    chat.Conversation(source, ScriptedRoom("/reset", takes_commands=False)).hold()
    assert source.asked == [[user("/reset")]]


def test_a_stopped_answer_ends_the_generation_and_stays_as_far_as_it_came() -> None:
    source = ScriptedSource(["Once", " upon", KeyboardInterrupt()], ["ok"])
    room = ScriptedRoom("a story", "go on")
    assert chat.Conversation(source, room).hold() == 0
    assert source.given[0].left
    assert room.remarks == ["stopped"]
    assert source.asked[1] == [user("a story"), assistant("Once upon"), user("go on")]


def test_a_turn_stopped_before_anything_came_is_taken_back() -> None:
    source = ScriptedSource([KeyboardInterrupt()], ["ok"])
    chat.Conversation(source, ScriptedRoom("a story", "other")).hold()
    assert source.asked[1] == [user("other")]


def test_a_failed_turn_is_taken_back_and_the_conversation_goes_on() -> None:
    source = ScriptedSource(["a"], ["half", ChatError("the longest request is 9 tokens")], ["b"])
    room = ScriptedRoom("one", "two", "three")
    assert chat.Conversation(source, room).hold() == 0
    assert room.complaints == ["the longest request is 9 tokens (/reset begins anew)"]
    assert source.asked[2] == [user("one"), assistant("a"), user("three")]


def test_in_a_pipe_a_failed_turn_ends_it_with_a_failure() -> None:
    source = ScriptedSource([ChatError("no")], ["never"])
    room = ScriptedRoom("one", "two", takes_commands=False)
    assert chat.Conversation(source, room).hold() == 1
    assert len(source.asked) == 1


def test_an_answer_cut_by_its_limit_says_so() -> None:
    room = ScriptedRoom("hi")
    chat.Conversation(ScriptedSource(["half of"], finish_reason="length"), room).hold()
    assert room.remarks == ["the answer reached its limit of tokens"]


def test_what_a_model_writes_cannot_command_the_terminal() -> None:
    assert harmless("\x1b[2Jred\x07\x9b1m\r\nkept\ttab é😀") == "␛[2Jred␇\ufffd1m\nkept\ttab é😀"


def test_numbers_show_what_is_known() -> None:
    assert (
        numbers_line(Numbers(1200, 96, 57, 38.21))
        == "prompt 1,200 tokens (96 cached), answer 57, 38.2 tokens/s"
    )
    assert numbers_line(Numbers(output_tokens=3)) == "answer 3"
    assert numbers_line(Numbers()) == ""


def test_events_are_read_as_the_standard_says() -> None:
    lines = [b": ping\n", b"event: x\n", b"data: one\r\n", b"data:two\n", b"\n", b"\n", b"data: cut off\n"]
    assert list(server_sent_events(lines)) == ["one\ntwo"]


def test_a_server_is_asked_with_the_history_and_its_stream_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n\n/etc is what?\n"))
    usage = {"prompt_tokens": 5, "completion_tokens": 2}
    with chat_server(stream("Hé", "llo\n😀", usage=usage), stream("A folder.")) as server:
        arguments = ["chat", "--url", server.url, "--api-key", "k", "--temperature", "0", "--system", "S"]
        assert main([*arguments, "--max-tokens", "9"]) == 0
    assert capsys.readouterr().out == "Hé" + "llo\n😀\nA folder.\n"
    first, second = server.requests
    assert first["messages"] == [{"role": "system", "content": "S"}, user("hi")]
    assert second["messages"][1:] == [user("hi"), assistant("Héllo\n😀"), user("/etc is what?")]
    assert (first["model"], first["stream"], first["temperature"], first["max_tokens"]) == (
        "scripted",
        True,
        0.0,
        9,
    )
    assert "top_p" not in first
    assert server.keys == ["Bearer k", "Bearer k"]


def test_numbers_of_a_server_come_from_its_usage() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
    with chat_server(stream("a", "b", usage=usage)) as server:
        source = RemoteSource(server.url, model="m", api_key=None)
        with source.ask([user("hi")]) as answer:
            assert "".join(answer) == "ab"
            numbers = answer.numbers()
    assert (numbers.prompt_tokens, numbers.cached_tokens, numbers.output_tokens) == (9, 4, 2)
    assert server.requests[0]["model"] == "m"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (json.dumps({"error": {"message": "too long: 9 of 8"}}).encode(), "too long: 9 of 8"),
        (b"{not json", "the server answered with status 400"),
        (event({"error": {"message": "the step failed"}}), "the step failed"),
        (event({"choices": [{"delta": {"content": "half"}}]}), "the connection ended before the answer did"),
        (b"data: {broken\n\n", "the stream broke off"),
    ],
)
def test_a_servers_failure_is_one_sentence(
    answer: bytes, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    with chat_server(answer) as server:
        assert main(["chat", "--url", server.url]) == 1
    error = capsys.readouterr().err
    assert error.startswith("octavo: error: ")
    assert said in error
    assert "Traceback" not in error


def test_leaving_an_answer_hangs_up() -> None:
    with chat_server("slow") as server:
        with RemoteSource(server.url, model="m", api_key=None).ask([user("hi")]) as answer:
            assert next(iter(answer)) == "w0 "
        assert server.hung_up.wait(10)


def test_an_address_that_is_none_or_where_nobody_answers_is_one_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # not listening
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        assert main(["chat", "--url", url]) == 1
    assert f"cannot reach {url}: " in capsys.readouterr().err
    assert main(["chat", "--url", "localhost:8000"]) == 1
    assert "is not an address such as http://127.0.0.1:8000/v1" in capsys.readouterr().err


def test_an_address_without_a_path_means_v1() -> None:
    with chat_server(stream("ok")) as server:
        assert RemoteSource(server.url.removesuffix("/v1"), model=None, api_key=None).name.endswith(
            server.url
        )


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (["--url", "http://127.0.0.1:1/v1", "--threads", "2"], 2, "--threads is for a model in this process"),
        (["--api-key", "k"], 2, "--api-key is for a server"),
        (["--temperature", "-1"], 1, "temperature"),
        (["no-such-model"], 1, "no-such-model"),
    ],
)
def test_what_cannot_begin_is_one_sentence(
    flags: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", *flags]) == code
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_real_engine_answers_in_a_pipe(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = []
    for _ in range(2):
        monkeypatch.setattr(sys, "stdin", io.StringIO("hello you\nand again\n"))
        assert main(["chat", str(tiny_model_path), "--temperature", "0", "--max-tokens", "8"]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    assert outputs[0].endswith("\n")
    assert len(outputs[0]) > 2


def test_a_real_engine_stops_at_a_stop_string(tiny_model_path: Path) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    with LLM(tiny_model_path, num_blocks_override=64) as llm:
        with LocalSource(llm, greedy, "tiny").ask([user("hello")]) as answer:
            text = "".join(answer)
        assert answer.finish_reason == "length"
        stop = text[9:12]
        with LocalSource(llm, replace(greedy, stop=(stop,)), "tiny").ask([user("hello")]) as answer:
            assert "".join(answer) == text[: text.index(stop)]
        assert answer.finish_reason == "stop"


class Terminal:
    """A pseudo-terminal with `octavo chat` in it."""

    def __init__(self, *arguments: str) -> None:
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            environment = os.environ | {"TERM": "xterm", "PYTHONPATH": os.pathsep.join(sys.path)}
            os.execve(
                sys.executable, [sys.executable, "-m", "octavo.cli.main", "chat", *arguments], environment
            )
        self._seen = b""
        self._read_to = 0

    def wait_for(self, text: bytes, seconds: float = 60) -> None:
        """Read until `text` appears after what was waited for before."""
        deadline = time.monotonic() + seconds
        while (place := self._seen.find(text, self._read_to)) < 0:
            assert time.monotonic() < deadline, f"no {text!r} in {self._seen!r}"
            if select.select([self._fd], [], [], 0.1)[0]:
                self._seen += os.read(self._fd, 65536)
        self._read_to = place + len(text)

    def send(self, keys: bytes) -> None:
        time.sleep(0.2)  # a person waits for the prompt
        os.write(self._fd, keys)

    def leave(self) -> int:
        self.send(b"\x04")
        try:
            while os.read(self._fd, 65536):
                pass
        except OSError:
            pass  # the other end is closed: that is how a pseudo-terminal says so
        os.close(self._fd)
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


def test_in_a_terminal_a_paste_is_one_message_and_ctrl_c_stops_only_the_answer() -> None:
    with chat_server(stream("Fine."), "slow", stream("Still here.")) as server:
        terminal = Terminal("--url", server.url)
        terminal.wait_for(b"> ")
        terminal.send(b"three\nlines\nat once\n")
        terminal.wait_for(b"Fine.")
        assert server.requests[0]["messages"] == [user("three\nlines\nat once")]
        terminal.wait_for(b"> ")
        terminal.send(b"count\n")
        terminal.wait_for(b"w3 ")
        terminal.send(b"\x03")
        terminal.wait_for(b"(stopped)")
        assert server.hung_up.wait(10)
        terminal.wait_for(b"> ")
        terminal.send(b"half a line\x03")
        terminal.wait_for(b"(Ctrl-D leaves)")
        terminal.wait_for(b"> ")
        terminal.send(b"there?\n")
        terminal.wait_for(b"Still here.")
        kept = server.requests[2]["messages"]
        assert kept[-1] == user("there?")
        assert kept[-2]["content"].startswith("w0 w1 w2 w3")
        terminal.wait_for(b"> ")
        assert terminal.leave() == 0
