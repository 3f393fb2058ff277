"""Octavo without a server: `LLM(model).generate(prompts, params)`. Names and results follow vLLM's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from octavo.engine.engine import Engine, EngineConfig
from octavo.engine.generation import ThreadMailbox
from octavo.engine.sampling_params import SamplingParams
from octavo.model.catalog import DEFAULT_MODEL, resolve_model
from octavo.model.model import Model
from octavo.text.chat_template import ChatTemplate, ChatTemplateError
from octavo.text.text_stream import TextStream
from octavo.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from octavo.engine.generation import Generation
    from octavo.engine.request import Delta, TokenLogprobs

Message = Mapping[str, Any]
"""One message of a conversation: {"role": ..., "content": ...}."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's natural log-probability in the raw logits, and the token as text."""

    logprob: float
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    """One choice.

    token_ids: every token generated, one that ended the output included; its text is not in `text`.
    logprobs: one mapping a token, the sampled token's id first; None unless asked for.
    finish_reason: "stop" or "length". stop_reason: the stop string or the id from `stop_token_ids` that
    ended it.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class RequestOutput:
    """One prompt and its choices. num_cached_tokens: prompt tokens the first choice did not compute
    itself."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0


class _Answer:
    """One choice in the making: tokens in, text out."""

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, generation: Generation, index: int
    ) -> None:
        wants_logprobs = params.logprobs is not None
        self.output = CompletionOutput(
            index,
            cumulative_logprob=0.0 if wants_logprobs else None,
            logprobs=[] if wants_logprobs else None,
        )
        self.generation = generation
        self.done = False
        self._tokenizer = tokenizer
        self._stream = TextStream(tokenizer, params.stop, min_tokens=params.min_tokens)
        self._text: list[str] = []

    def receive(self) -> None:
        """Take in everything that has arrived. Raises RequestFailed."""
        while not self.done and (delta := self.generation.take()) is not None:
            self._add(delta)

    def _add(self, delta: Delta) -> None:
        finish_reason = delta.finish_reason
        text, starts = self._stream.add(delta.text_token_ids, last=finish_reason is not None)
        self._text.append(text)
        matched = self._stream.matched
        num_taken = len(delta.token_ids) if matched is None else len(starts)
        self.output.token_ids += delta.token_ids[:num_taken]
        for entry in delta.logprobs[:num_taken]:
            self._add_logprobs(entry)
        if matched is not None:
            self.generation.cancel(reason="stop")
            self._end("stop", matched)
        elif finish_reason is not None:
            by_name = delta.stop_token_id not in self._tokenizer.eos_token_ids
            self._end(finish_reason, delta.stop_token_id if by_name else None)

    def _add_logprobs(self, entry: TokenLogprobs) -> None:
        output = self.output
        assert output.logprobs is not None
        assert output.cumulative_logprob is not None
        output.cumulative_logprob += entry.logprob
        pairs = [(entry.token_id, entry.logprob), *entry.top]
        text = self._tokenizer.token_text
        output.logprobs.append({token_id: Logprob(value, text(token_id)) for token_id, value in pairs})

    def _end(self, finish_reason: str, stop_reason: str | int | None) -> None:
        self.output.text = "".join(self._text)
        self.output.finish_reason = finish_reason
        self.output.stop_reason = stop_reason
        self.done = True


class LLM:
    """A model, its tokenizer and an engine, for scripts. Close it, or use it in a `with` statement.

    model: a GGUF file, or a name known to `octavo pull`. threads: of the native kernels; None: what fits
    the machine.
    engine_config: the fields of `EngineConfig`, such as kv_cache_dtype="q8".

    Raises: ModelNotFound, ModelFileError, UnsupportedTokenizer for the file; MemoryRefused if weights
    or pool do not fit.
    """

    def __init__(
        self, model: str | Path = DEFAULT_MODEL, *, threads: int | None = None, **engine_config: Any
    ) -> None:
        config = EngineConfig(**engine_config)
        with ExitStack() as stack:
            self.model = Model.load(resolve_model(model), num_threads=threads)
            stack.callback(self.model.close)
            self.tokenizer = Tokenizer.from_gguf(self.model.metadata)
            self.chat_template = ChatTemplate.from_gguf(self.model.metadata)
            self.model.drop_metadata()
            self.engine = Engine(self.model, self.tokenizer, config)
            self.engine.start()
            self._resources = stack.pop_all()

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Continue every prompt; all of them run together. Results are in the order of the prompts.

        prompts: one text, several, or several lists of token ids; control tokens spelled in a text are
        recognised, as /v1/completions does. params: one for all or one for each.

        Raises: RequestRefused if a prompt can never fit, RequestFailed if one cannot be finished; in both
        cases the others are cancelled. ValueError if there are not as many params as prompts.
        """
        several: Sequence[str | Sequence[int]] = [prompts] if isinstance(prompts, str) else prompts
        texts = [prompt if isinstance(prompt, str) else None for prompt in several]
        token_ids: list[list[int]] = [
            self.tokenizer.encode(prompt, parse_special=True)
            if isinstance(prompt, str)
            else list(map(int, prompt))
            for prompt in several
        ]
        return self._run(texts, token_ids, params)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or several, with the file's chat template.

        Raises: ChatTemplateError where the file has none or it refuses the messages; and what `generate`
        raises.
        """
        if self.chat_template is None:
            raise ChatTemplateError("this model file has no chat template; use generate")
        conversations: list[Any] = list(messages)
        if conversations and isinstance(conversations[0], Mapping):
            conversations = [conversations]
        texts = [self.chat_template.render(conversation) for conversation in conversations]
        token_ids = [self.tokenizer.encode(text, add_special=False, parse_special=True) for text in texts]
        return self._run(texts, token_ids, params)

    def _run(
        self,
        texts: Sequence[str | None],
        prompts: list[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[RequestOutput]:
        if params is None:
            params = SamplingParams()
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"{len(each)} sampling params for {len(prompts)} prompts")
        mailbox = ThreadMailbox()
        waiting: dict[Generation, _Answer] = {}
        choices: list[list[_Answer]] = []
        with ExitStack() as stack:
            for prompt, one in zip(prompts, each, strict=True):
                answers = []
                for index in range(one.n):
                    generation = stack.enter_context(
                        self.engine.submit(prompt, one, choice_index=index, bounded=False)
                    )
                    answers.append(_Answer(self.tokenizer, one, generation, index))
                    waiting[generation] = answers[-1]
                choices.append(answers)
            for generation in waiting:
                mailbox.watch(generation)
            while waiting:
                for generation in mailbox.wait():
                    answer = waiting.get(generation)
                    if answer is None:
                        continue
                    answer.receive()
                    if answer.done:
                        del waiting[generation]
                    else:
                        mailbox.watch(generation)
        return [
            RequestOutput(
                request_id=answers[0].generation.request_id,
                prompt=text,
                prompt_token_ids=prompt,
                outputs=[answer.output for answer in answers],
                num_cached_tokens=answers[0].generation.stats.num_cached_tokens,
            )
            for text, prompt, answers in zip(texts, prompts, choices, strict=True)
        ]

    def close(self) -> None:
        """Stop the engine, then let the model go; once or more often. Raises what `Engine.close` raises."""
        self.engine.close()
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
