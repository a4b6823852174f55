"""Compiles structures for one model: in time or not at all, once for many jobs.

job ─→ checked apart, killed when it computes for too long ─→ compiled here ─→ remembered
               └─→ refused, and the refusal remembered
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future
from typing import Protocol

from llguidance import LLMatcher, LLTokenizer

from chairlift_client.errors import InvalidJob
from chairlift_client.protocol import encode
from chairlift_client.sampling import Structured
from chairlift_worker.apart import ApartError, run_apart
from chairlift_worker.structured.source import limits, to_source
from chairlift_worker.structured.state import CompiledGrammar

CPU_S = 2.0
"""Usual schemas take milliseconds."""

NUM_REMEMBERED = 256
MAX_ERROR_CHARS = 500


class TokenizerSource(Protocol):
    """A `tokenizers.Tokenizer`."""

    def to_str(self) -> str:
        """Its definition as JSON."""
        ...


class StructureCompiler:
    """May be called from any thread but the engine's and the event loop's: it takes its time."""

    def __init__(
        self,
        tokenizer: TokenizerSource,
        *,
        vocab_size: int,
        endings: frozenset[int],
        cpu_s: float = CPU_S,
    ) -> None:
        self._source = tokenizer
        self._vocab_size = vocab_size
        self._endings = frozenset(token_id for token_id in endings if 0 <= token_id < vocab_size)
        self._cpu_s = cpu_s
        self._tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, Future[CompiledGrammar | str]] = OrderedDict()
        """What was compiled, and why others were refused; the last asked for at the end."""

    def compile(self, structured: Structured) -> CompiledGrammar:
        """The compiled structure. InvalidJob for one that is malformed, too large, or takes too long."""
        key = encode(structured)
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
            else:
                mine = self._known[key] = Future[CompiledGrammar | str]()
                if len(self._known) > NUM_REMEMBERED:
                    self._known.popitem(last=False)
        if known is None:
            self._fulfil(mine, key, structured)
            known = mine
        answer = known.result()
        if isinstance(answer, str):
            raise InvalidJob(answer)  # a new one each time: an exception keeps every frame it was raised in
        return answer

    def _fulfil(self, promise: Future[CompiledGrammar | str], key: bytes, structured: Structured) -> None:
        try:
            promise.set_result(self._compile(structured))
        except InvalidJob as refusal:
            promise.set_result(str(refusal))
        except BaseException as error:
            with self._lock:
                self._known.pop(key, None)  # our own fault is not to be remembered
            promise.set_exception(error)

    def _compile(self, structured: Structured) -> CompiledGrammar:
        kind = structured.__struct_config__.tag
        try:
            source = to_source(structured)
            problem = run_apart("chairlift_worker.structured.check", source.encode(), self._cpu_s).decode()
        except ValueError as error:
            problem = str(error)
        except ApartError as error:
            raise InvalidJob(f"structured: this {kind} cannot be compiled: {error}") from error
        if problem:
            raise InvalidJob(f"structured: this {kind} cannot be compiled: {problem[:MAX_ERROR_CHARS]}")
        matcher = LLMatcher(self._ll_tokenizer(), source, log_level=0, limits=limits())
        if matcher.is_error():
            problem = matcher.get_error()[:MAX_ERROR_CHARS]
            raise InvalidJob(f"structured: this {kind} cannot be compiled: {problem}")
        return CompiledGrammar(matcher, self._vocab_size, self._endings)

    def _ll_tokenizer(self) -> LLTokenizer:
        """Made when the first structured job comes: it takes a moment for a large vocabulary."""
        with self._lock:
            if self._tokenizer is None:
                endings = sorted(self._endings) or None
                try:
                    self._tokenizer = LLTokenizer(
                        self._source.to_str(), n_vocab=self._vocab_size, eos_token=endings
                    )
                except ValueError as error:
                    raise InvalidJob(
                        f"structured output is not possible with this model's tokenizer: {error}"
                    ) from error
            return self._tokenizer
