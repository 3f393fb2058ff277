"""What a stream, a short question and a background job feel of a long prompt, and what it feels of them.

    python benchmarks/long_prompt.py [--model M] [--threads N] [--target-itl-ms MS] [--runs R] [--json]

Each run, in one process and without HTTP:

1. the long prompt alone: its speed;
2. one stream, then the long prompt of somebody else, then right behind it a short question of that same
   user: the stream's largest gap until the long prompt has its first token, the steps until the short one
   has, and the long one's speed beside that of 1;
3. a follow-up in a chat alone, and beside background work with long prompts: first tokens, cached tokens.

Medians of the runs, and the worst of the gaps.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from octavo.bench.machine import Machine
from octavo.bench.prompts import seeded_prompts
from octavo.engine.engine import Engine
from octavo.engine.generation import Generation
from octavo.engine.sampling_params import SamplingParams
from octavo.llm import LLM
from octavo.model.catalog import DEFAULT_MODEL
from octavo.scheduler.share import Share

LONG, SHORT, CHAT = 3_000, 20, 600
STREAMED = 40
"""Tokens that the stream has before the long prompt comes."""


@dataclass(frozen=True, slots=True)
class Run:
    """Seconds, tokens a second, steps, tokens."""

    solo_speed: float
    speed: float
    largest_gap: float
    second_largest_gap: float
    short_steps: int
    short_first_token: float
    chat_alone: float
    chat_beside_background: float
    longest_background_step: float
    chat_cached: int
    chat_cached_beside_background: int


@dataclass
class Reader:
    """A thread that reads a stream, and when each token came."""

    engine: Engine
    generation: Generation
    sent_at: float
    sent_in_step: int
    times: list[float] = field(default_factory=list)
    first_in_step: int = 0

    def __post_init__(self) -> None:
        self.first = threading.Event()
        self.many = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for delta in self.generation:
            now = time.monotonic()
            self.times += [now] * len(delta.token_ids)
            if not self.first.is_set():
                self.first_in_step = self.engine.metrics.step_times.num_steps
                self.first.set()
            if len(self.times) >= STREAMED:
                self.many.set()

    def stop(self) -> None:
        self.generation.cancel()
        self._thread.join(timeout=60)

    @property
    def first_token(self) -> float:
        """Seconds."""
        return self.times[0] - self.sent_at


def ask(
    engine: Engine, prompt: list[int], max_tokens: int, account: str, *, background: bool = False
) -> Reader:
    """Send a request whose answer has `max_tokens` tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    share = Share(account, background=background)
    sent_at, step = time.monotonic(), engine.metrics.step_times.num_steps
    return Reader(engine, engine.submit(prompt, params, share=share), sent_at, step)


def finished(reader: Reader) -> Reader:
    """Once it has its first token."""
    if not reader.first.wait(timeout=300):
        raise TimeoutError("no token in five minutes")
    return reader


def run(engine: Engine, prompts: Callable[[int], list[int]]) -> Run:
    """One run; `prompts(n)`: n token ids that nobody has sent before."""
    solo = finished(ask(engine, prompts(LONG), 1, "solo"))

    stream = ask(engine, prompts(SHORT), 4_000, "stream")
    stream.many.wait(timeout=60)
    long = ask(engine, prompts(LONG), 1, "reader")
    time.sleep(0.01)
    short = ask(engine, prompts(SHORT), 2, "reader")
    finished(long)
    stream.stop()
    until = [when for when in stream.times if when <= long.times[0]]
    since = next(i for i, when in enumerate(until) if when >= long.sent_at) - 1
    gaps = sorted(after - before for before, after in zip(until[since:], until[since + 1 :], strict=False))

    chat, longest = [], 0.0
    for busy in (False, True):
        history = prompts(CHAT)
        finished(ask(engine, history, 1, "chat"))
        jobs = [ask(engine, prompts(LONG), 64, f"job {i}", background=True) for i in range(2)] if busy else []
        if busy:
            time.sleep(1.0)
        follow_up = finished(ask(engine, history + prompts(SHORT), 1, "chat"))
        chat.append((follow_up.first_token, follow_up.generation.stats.num_cached_tokens))
        num_steps = engine.metrics.step_times.num_steps - (jobs[0].sent_in_step if busy else 0)
        longest = max(engine.metrics.step_times.steps()[-num_steps:])
        for job in jobs:
            job.stop()
    return Run(
        LONG / solo.first_token,
        LONG / long.first_token,
        gaps[-1],
        gaps[-2],
        short.first_in_step - short.sent_in_step,
        short.first_token,
        chat[0][0],
        chat[1][0],
        longest,
        chat[0][1],
        chat[1][1],
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="What a stream feels of a long prompt.")
    flag = parser.add_argument
    flag("--model", default=DEFAULT_MODEL)
    flag("--threads", type=int)
    flag("--target-itl-ms", type=float, default=50.0)
    flag("--runs", type=int, default=5)
    flag("--json", action="store_true")
    args = parser.parse_args()
    with LLM(args.model, threads=args.threads, target_itl_ms=args.target_itl_ms) as llm:
        machine = Machine.now(llm.model.num_threads, llm.model.instruction_set)
        supply = iter(seeded_prompts(llm.tokenizer, 12 * (args.runs + 1), LONG, seed=1))
        runs = [run(llm.engine, lambda count: next(supply)[:count]) for _ in range(args.runs + 1)][1:]
    values = {one.name: [getattr(each, one.name) for each in runs] for one in dataclasses.fields(Run)}
    middle = {name: statistics.median(each) for name, each in values.items()}
    target = args.target_itl_ms / 1000
    report = {
        **middle,
        "worst_gap": max(values["largest_gap"]),
        "largest_gap_over_target": middle["largest_gap"] / target,
        "speed_over_solo": statistics.median(each.speed / each.solo_speed for each in runs),
        "worst_short_steps": max(values["short_steps"]),
    }
    if args.json:
        print(json.dumps({"machine": dataclasses.asdict(machine), "runs": args.runs, **report}, indent=2))
        return 0
    ms = {name: f"{1e3 * value:.1f} ms" for name, value in report.items()}
    print(machine.describe())
    print(
        f"stream: largest gap {ms['largest_gap']}, the next {ms['second_largest_gap']}, "
        f"worst {ms['worst_gap']}; {report['largest_gap_over_target']:.2f} of the target"
    )
    print(
        f"long prompt: {middle['speed']:.0f} tokens/s, alone {middle['solo_speed']:.0f}; "
        f"{report['speed_over_solo']:.2f} of that"
    )
    print(
        f"short one right behind it: first token in {middle['short_steps']:.0f} steps "
        f"(worst {report['worst_short_steps']}), {ms['short_first_token']}"
    )
    print(
        f"chat's follow-up: {ms['chat_alone']} alone, {ms['chat_beside_background']} beside background work, "
        f"whose longest step takes {ms['longest_background_step']}; cached {middle['chat_cached']:.0f} and "
        f"{middle['chat_cached_beside_background']:.0f} tokens"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
