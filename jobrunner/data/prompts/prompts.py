"""Rows to requests, with the tokenizer of one model. Knows nothing of files of rows or tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from jobrunner.config import SOURCES, GenerationTable, InputTable
from jobrunner.data.openai.requests import read_request
from jobrunner.data.openai.token_bytes import TokenSpelling
from jobrunner.data.prompts.chat import open_chat
from jobrunner.data.prompts.decoding import Decoder, Stream
from jobrunner.data.prompts.encoding import Draft, Encoder
from jobrunner.data.prompts.faults import RowFault
from jobrunner.data.prompts.material import Materials
from jobrunner.data.prompts.parameters import RowParameters, effective_generation
from jobrunner.data.prompts.sampling import Samplings
from jobrunner.data.prompts.schedule import arrival_of, priority_of
from jobrunner.data.prompts.tokenizer import Tokenizer
from jobrunner.records import Completion, Partial, Request, Row, SampleId, TextStream

# settings of the input that decide about requests
_DESCRIBED = (
    "system chat template prefill tools params token_ids too_long chat_template_kwargs".split()
)


class Prompts:
    """Turns rows into requests and completions into text, with the tokenizer of one model.

    `input` and `generation` are the job's settings, `base` is the folder of its file. Lengths
    are in tokens. `job_seed` keys the random draws by row, but where a seed is given: that one
    keys them for every row alike. `logprobs` asks for log-probabilities, as in `Sampling`.
    Encoding on one thread and decoding on another is safe.

    Text that spells a special token is text where it comes from rows or from `input.system`; in
    the job's own templates (`input.template`, `input.prefill`) it is that token, as in a chat
    template. A prefill is part of the prompt, not of the output's text.

    Raises ModelError where the folder has no usable tokenizer, ConfigError where settings do not
    go with the model: no chat template, a template that is none, unknown tokens.
    """

    def __init__(
        self,
        folder: Path,
        *,
        input: InputTable,
        generation: GenerationTable,
        job_seed: int,
        max_model_len: int,
        base: Path,
        logprobs: int | None = None,
    ) -> None:
        self._tokenizer = Tokenizer(folder)
        self._decoder = Decoder(self._tokenizer.loaded)
        self._spelling = TokenSpelling(self._tokenizer.loaded)
        self._input = input
        self._job_seed = job_seed
        self._max_model_len = max_model_len
        self._logprobs = logprobs
        literal = self._tokenizer.literal
        all_marked = literal.spelled_in(input.system)
        system = literal.mark(input.system) if all_marked else input.system
        self._chat = open_chat(self._tokenizer.loaded, input, folder, base, system)
        vocabulary = self._tokenizer.vocabulary
        self._materials = Materials(input, self._chat, vocabulary)
        self._encoder = Encoder(
            self._tokenizer, self._materials, input, max_model_len, all_marked=all_marked
        )
        self._generation = effective_generation(generation, folder)
        self._parameters = RowParameters(input.params, self._generation, vocabulary)
        self._samplings = Samplings(self._generation, job_seed, self._tokenizer.end_ids)

    @property
    def effective(self) -> Mapping[str, object]:
        """The generation parameters of a row that sets none, by their names in a job file."""
        values = self._generation.model_dump(exclude={"use_model_defaults"})
        return {key: list(v) if isinstance(v, tuple) else v for key, v in values.items()}

    @property
    def tells_the_time(self) -> bool:
        """Whether the chat template may give a row another prompt on another day."""
        return self._chat is not None and self._chat.tells_the_time

    def encode(
        self, rows: Sequence[Row], resumed: Mapping[SampleId, Partial]
    ) -> list[Request | Completion]:
        """Turn each row into its requests, one a sample, or a completion that carries its error.

        In the order of `rows` and samples. A sample in `resumed` goes on after its saved tokens,
        as the next attempt.
        """
        drafts = [self._draft(row) for row in rows]
        self._encoder.encode(drafts)
        return [outcome for draft in drafts for outcome in self._outcomes(draft, resumed)]

    def text(self, completion: Completion) -> str:
        """Decode the output: no stop id, nothing from the stop string on, nothing special.

        A character is whole or, where the length cut it, exactly one U+FFFD.
        """
        tokens, request = completion.tokens, completion.request
        if completion.stop_string is not None:
            return self._before(completion.stop_string, tokens)
        stop_ids = () if request is None else request.sampling.stop_ids
        ended = completion.finish_reason == "stop" and tokens and tokens[-1] in stop_ids
        return self._decoder.decode(tokens[:-1] if ended else tokens)

    def prompt_text(self, request: Request) -> str:
        """The prompt as the model sees it: special tokens are visible."""
        return self._tokenizer.visible(request.prompt)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token stands for; a special one for its name."""
        return self._spelling(token)

    def open_text(self) -> TextStream:
        """Open a stream that turns the output tokens of one request into text."""
        return Stream(self._decoder)

    def describe(self) -> dict[str, object]:
        """Name what decides about requests, beside rows and the tokenizer's files, with values."""
        # what TOML has and JSON has not, as dates, is text
        settings = json.loads(
            json.dumps(self._input.model_dump(include={*_DESCRIBED}), default=str)
        )
        return {
            "input kind": _kind(self._input),
            **{f"input.{key}": settings[key] for key in _DESCRIBED},
            "chat template": None if self._chat is None else self._chat.digest,
            "end ids": sorted(self._tokenizer.end_ids),
            "model.max_model_len": self._max_model_len,
            "job.seed": self._job_seed,
            **{f"generation.{key}": value for key, value in self.effective.items()},
            "output.logprobs": self._logprobs,
        }

    def _draft(self, row: Row) -> Draft:
        """Read what a row brings, and what parameters it sets."""
        draft = Draft(row, self._generation, self._logprobs, error=row.error)
        if row.error is not None:
            return draft
        try:
            if self._input.format == "openai":
                asked = read_request(row.others)
                material = self._materials.take_asked(asked)
                draft.generation = self._parameters.changed_by(asked.params, "its body")
                if asked.logprobs is not None:
                    draft.logprobs = asked.logprobs
            else:
                material = self._materials.take(row)
                draft.generation = self._parameters.of(row)
            draft.priority = priority_of(row, self._input.priority)
            draft.arrival_s = arrival_of(row, self._input.arrival)
            draft.material = material
        except RowFault as fault:
            draft.fail(fault)
        return draft

    def _outcomes(
        self, draft: Draft, resumed: Mapping[SampleId, Partial]
    ) -> Sequence[Request | Completion]:
        if draft.error is not None:
            length = draft.prompt_tokens
            return [Completion(draft.row.id, prompt_tokens=length, error=draft.error)]
        return self._requests(draft, resumed)

    def _requests(self, draft: Draft, resumed: Mapping[SampleId, Partial]) -> list[Request]:
        assert draft.ids is not None
        row = draft.row.id
        room = self._max_model_len - len(draft.ids)
        samplings = self._samplings.of(draft.generation, row, room=room, logprobs=draft.logprobs)
        requests = []
        for sample, sampling in enumerate(samplings):
            saved = resumed.get(SampleId(row, sample)) if resumed else None
            request = Request(
                row,
                draft.ids,
                sampling,
                output=saved.tokens if saved else (),
                attempt=saved.attempt + 1 if saved else 1,
                sample=sample,
                samples=len(samplings),
                truncated_tokens=draft.truncated_tokens,
                logprobs=saved.logprobs if saved else (),
                priority=draft.priority,
                arrival_s=draft.arrival_s,
            )
            requests.append(request)
        return requests

    def _before(self, stop: str, tokens: Sequence[int]) -> str:
        """The text before a stop string that became whole with the last token."""
        text = self._decoder.decode(tokens)
        known = len(self._decoder.decode(tokens[:-1]).removesuffix("\ufffd"))
        # one that was whole before was passed over, for the sake of `min_new_tokens`
        place = text.find(stop, max(0, known - len(stop) + 1))
        return text[:place] if place >= 0 else text


def _kind(table: InputTable) -> str:
    return next((name for name in SOURCES if getattr(table, name) is not None), table.format)
