"""Prompts to token ids: many at once, or one by one where a row needs care. Draws nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jobrunner.config import GenerationTable, InputTable
from jobrunner.data.prompts.faults import RowFault
from jobrunner.data.prompts.material import Material, Materials, Rendered, surrogate_fault
from jobrunner.data.prompts.nested import at, with_text
from jobrunner.data.prompts.tokenizer import Tokenizer
from jobrunner.data.prompts.truncation import cut_ids, cut_text
from jobrunner.records import Row, RowError


@dataclass(slots=True)
class Draft:
    """A row on its way to its requests: `material`, then `rendered`, then `ids`, or an `error`.

    `truncated_tokens` are no longer in `ids`; `prompt_tokens` are told of a failed row.
    """

    row: Row
    generation: GenerationTable
    logprobs: int | None
    error: RowError | None = None
    prompt_tokens: int = 0
    material: Material | None = None
    rendered: Rendered | None = None
    ids: list[int] | None = None
    truncated_tokens: int = 0
    priority: int = 0
    arrival_s: float = 0.0

    def fail(self, fault: RowFault) -> None:
        self.prompt_tokens = fault.prompt_tokens
        self.error = fault.error(self.row.id)


class Encoder:
    """Gives drafts their ids. `all_marked`: the job's own texts spell special tokens."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        materials: Materials,
        table: InputTable,
        max_model_len: int,
        *,
        all_marked: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._materials = materials
        self._table = table
        self._max_model_len = max_model_len
        self._all_marked = all_marked

    def encode(self, drafts: Sequence[Draft]) -> None:
        """Give each draft that has a material ids that fit, or an error."""
        for draft in drafts:
            self._begin(draft)
        for whole in (False, True):
            self._encode_together([draft for draft in drafts if _waits(draft, whole=whole)])
        for draft in drafts:
            if draft.ids is not None:
                self._fit(draft, draft.ids)

    def _begin(self, draft: Draft) -> None:
        """Render a row; a rare one, that spells special tokens, is encoded too."""
        material = draft.material
        if material is None:
            return
        try:
            if material.is_ids:
                draft.ids = material.content
            elif self._is_spelled(material):
                draft.ids = self._ids(material)
            else:
                draft.rendered = self._materials.render(material)
        except RowFault as fault:
            draft.fail(fault)

    def _is_spelled(self, material: Material) -> bool:
        spelled_in = self._tokenizer.literal.spelled_in
        return (
            self._all_marked
            or spelled_in(material.content)
            or bool(material.tools and spelled_in(material.tools))
            or bool(material.columns and spelled_in(material.columns))
        )

    def _encode_together(self, drafts: Sequence[Draft]) -> None:
        """Encode rows of one kind at once, or one by one if the tokenizer refuses one of them."""
        rendered = [draft.rendered for draft in drafts if draft.rendered is not None]
        if not rendered:
            return
        whole = rendered[0].whole
        try:
            encoded = self._tokenizer.encode([one.text for one in rendered], whole=whole)
        except Exception:  # noqa: BLE001 - tokenizers raises bare Exception; row by row finds which
            for draft in drafts:
                self._encode_draft(draft)
            return
        for draft, ids in zip(drafts, encoded, strict=True):
            draft.ids = self._one_bos(ids) if whole else ids

    def _encode_draft(self, draft: Draft) -> None:
        assert draft.material is not None
        try:
            draft.ids = self._ids(draft.material)
        except RowFault as fault:
            draft.fail(fault)

    def _ids(self, material: Material) -> list[int]:
        """Render and encode one row by itself. Raises RowFault."""
        marked = self._is_spelled(material)
        seen = self._marked(material) if marked else material
        text, whole = self._materials.render(seen)
        try:
            if marked:
                ids = self._tokenizer.literal.encode(text, whole=whole)
            else:
                (ids,) = self._tokenizer.encode([text], whole=whole)
        except RowFault:
            raise
        except Exception as error:  # tokenizers raises bare Exception
            unknown = RowFault("bad_text", f"cannot be tokenised: {error}")
            raise surrogate_fault(material) or unknown from error
        return self._one_bos(ids) if whole else ids

    def _marked(self, material: Material) -> Material:
        mark = self._tokenizer.literal.mark
        return replace(
            material,
            content=mark(material.content),
            tools=mark(material.tools),
            columns=mark(material.columns),
        )

    def _one_bos(self, ids: list[int]) -> list[int]:
        # a template of the job may write the BOS that the tokenizer adds
        return ids if self._table.template is None else self._tokenizer.without_second_bos(ids)

    def _fit(self, draft: Draft, ids: list[int]) -> None:
        try:
            self._check(ids)
            draft.ids = self._fitted(draft, ids)
            draft.truncated_tokens = len(ids) - len(draft.ids)
        except RowFault as fault:
            draft.fail(fault)

    def _check(self, ids: list[int]) -> None:
        if not ids:
            raise RowFault("empty_prompt", "yields no tokens")
        unknown = self._tokenizer.unknown_to_model(ids)
        if unknown is not None:
            last = self._tokenizer.vocabulary - 1
            words = f"gives the token {unknown:,}, the model's last one is {last:,}"
            raise RowFault("bad_text", words)

    def _fitted(self, draft: Draft, ids: list[int]) -> list[int]:
        """The prompt, cut where it is too long and the job says so. Raises RowFault.

        Room is made for all new tokens; where the templates alone leave none for them, a prompt
        that leaves room for one is good, as it is where nothing is cut.
        """
        most = self._max_model_len - 1
        if self._table.too_long != "error":
            for limit in (self._max_model_len - draft.generation.max_new_tokens, most):
                fitting = ids if len(ids) <= limit else self._cut(draft, ids, limit)
                if fitting is not None:
                    return fitting
        if len(ids) > most:
            words = f"has {len(ids):,} tokens, limit {most:,}"
            raise RowFault("prompt_too_long", words, prompt_tokens=len(ids))
        return ids

    def _cut(self, draft: Draft, ids: list[int], limit: int) -> list[int] | None:
        """Cut what users wrote, the longest text first, until it fits; None if it cannot."""
        material, side = draft.material, self._table.too_long
        assert material is not None
        assert side != "error"
        if limit < 1:
            return None
        if material.is_ids:
            return cut_ids(ids, limit, side)
        for path in self._materials.cuttable(material):
            text = at(material.content, path)
            ends = self._tokenizer.boundaries(text)
            kept = len(ends)
            while kept > 0:
                kept = max(0, kept - (len(ids) - limit))
                content = with_text(material.content, path, cut_text(text, ends, kept, side))
                if content == "":
                    # nothing is left of a prompt
                    return None
                material = replace(material, content=content)
                ids = self._ids(material)
                if len(ids) <= limit:
                    return ids
        return None


def _waits(draft: Draft, *, whole: bool) -> bool:
    rendered = draft.rendered
    return draft.ids is None and rendered is not None and rendered.whole is whole
