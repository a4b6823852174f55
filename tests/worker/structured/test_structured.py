"""Texts of a random model that must have a form: they have it, in any company and after any resume."""

from __future__ import annotations

import json
import random
import re
import resource
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest

from chairlift_client.errors import InvalidJob
from chairlift_client.protocol import SamplingParams
from chairlift_client.sampling import Grammar, JsonSchema, OneOf, Regex, Structured
from chairlift_worker.engine.engine import Engine
from chairlift_worker.engine.grammar import GrammarError
from chairlift_worker.engine.request import EngineConfig, EngineRequest
from chairlift_worker.structured.compiler import StructureCompiler
from context_runner import EOS, ContextRunner
from engine_runs import Told, expect_short_outputs, run
from tokenizer_kinds import byte_level

VOCAB = 640
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bé", None]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
# Seven primes: its compiler builds an automaton of their product, 215,656,441 states.
ENDLESS = JsonSchema(
    schema={"type": "integer", "allOf": [{"multipleOf": p} for p in (7, 11, 13, 17, 19, 23, 29)]}
)

FORMS: dict[str, Structured] = {
    "schema": JsonSchema(schema=PERSON),
    "regex": Regex(pattern=r"[a-f]{2,4}-\d{3}(é|漢)?"),
    "grammar": Grammar(grammar='start: sum\nsum: number ("+" number)~1..3\nnumber: /[0-9]{1,3}/\n'),
    "choice": OneOf(options=('yes "really"', "no\n", "çok 😊", "no")),
}


def has_form(form: Structured, text: str) -> bool:
    match form:
        case JsonSchema(schema=schema):
            jsonschema.validate(json.loads(text), schema)
            return True
        case Regex(pattern=pattern):
            return re.fullmatch(pattern, text) is not None
        case Grammar():
            return re.fullmatch(r"\d{1,3}(\+\d{1,3}){1,3}", text) is not None
        case OneOf(options=options):
            return text in options


@pytest.fixture(scope="module")
def compiler() -> StructureCompiler:
    return StructureCompiler(byte_level(), vocab_size=VOCAB, endings=frozenset({EOS}))


def engine(config: EngineConfig | None = None, *, num_blocks: int = 512) -> Engine:
    runner = ContextRunner(vocab_size=VOCAB, num_blocks=num_blocks, block_size=4)
    return Engine(runner, byte_level(), config or EngineConfig())


def request(compiler: StructureCompiler, form: Structured, seed: int, **fields: Any) -> EngineRequest:
    sampling = SamplingParams(**{"max_tokens": 300, **fields})
    grammar = compiler.compile(form)
    return EngineRequest(f"job-{seed}", (seed + 3, 9), sampling, seed, order=seed, grammar=grammar)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_text_has_its_form(compiler: StructureCompiler, form: Structured, temperature: float) -> None:
    requests = [request(compiler, form, seed, temperature=temperature) for seed in range(8)]
    texts = set()
    for told in run(engine(), requests).values():
        assert told.failure is None
        assert told.end is not None
        assert told.end.finish_reason == "stop"
        assert has_form(form, told.text), told.text
        texts.add(told.text)
    assert len(texts) > 1


@pytest.mark.parametrize("schema", [{}, True])
def test_the_empty_schema_is_any_json(compiler: StructureCompiler, schema: Any) -> None:
    for seed in range(4):
        one = request(compiler, JsonSchema(schema=schema), seed, max_tokens=400, logit_bias={EOS: 4.0})
        told = run(engine(), [one])[one.job_id]
        assert told.end is not None
        if told.end.finish_reason == "stop":
            json.loads(told.text)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_text_resumes_in_the_middle_of_its_form(compiler: StructureCompiler, form: Structured) -> None:
    """The state is computed from the logged tokens: it does not begin at the root again."""
    whole_request = request(compiler, form, 5)
    whole = run(engine(), [whole_request])[whole_request.job_id]
    for split in range(len(whole.token_ids) + 1):
        resumed = whole_request._replace(logged_token_ids=tuple(whole.token_ids[:split]))
        rest = run(engine(), [resumed])[whole_request.job_id]
        assert rest.token_ids == whole.token_ids[split:]
        assert rest.end is not None
        assert rest.end.full_text == whole.text


def test_preempted_and_crowded_texts_are_the_same(compiler: StructureCompiler) -> None:
    requests = [request(compiler, form, seed) for seed, form in enumerate([*FORMS.values()] * 3)]
    alone: dict[str, Told] = {one.job_id: run(engine(), [one])[one.job_id] for one in requests}
    crowded = expect_short_outputs(engine(EngineConfig(6, 20, 5), num_blocks=76))
    random.Random(3).shuffle(requests)
    crowd = run(crowded, [one._replace(order=order) for order, one in enumerate(requests)])
    assert {job_id: told.token_ids for job_id, told in crowd.items()} == {
        job_id: told.token_ids for job_id, told in alone.items()
    }


def test_each_choice_has_a_state_of_its_own(compiler: StructureCompiler) -> None:
    form = FORMS["schema"]
    lift = engine()
    lift.add(request(compiler, form, 1, n=4))
    texts: dict[int, str] = {}
    while (report := lift.step(now_ms=0)) is not None:
        for delta in report.deltas:
            texts[delta.choice] = texts.get(delta.choice, "") + delta.text
    assert len(set(texts.values())) == 4
    assert all(has_form(form, text) for text in texts.values())


def test_a_form_that_is_complete_ends_whatever_min_tokens_says(compiler: StructureCompiler) -> None:
    one = request(compiler, Regex(pattern="ab"), 1, min_tokens=50, max_tokens=60)
    told = run(engine(), [one])[one.job_id]
    assert told.text == "ab"
    # Where the text may end or go on, the end is banned as ever.
    one = request(compiler, Regex(pattern="a*"), 1, min_tokens=20, max_tokens=60, logit_bias={EOS: 900.0})
    told = run(engine(), [one])[one.job_id]
    assert len(told.token_ids) == 21
    assert set(told.text) == {"a"}


def test_max_tokens_cuts_a_form_off(compiler: StructureCompiler) -> None:
    one = request(compiler, FORMS["schema"], 1, max_tokens=5)
    told = run(engine(), [one])[one.job_id]
    assert told.end is not None
    assert told.end.finish_reason == "length"
    assert len(told.token_ids) == 5
    assert told.text.lstrip().startswith("{")


def test_stop_strings_work_beside_a_form(compiler: StructureCompiler) -> None:
    one = request(compiler, FORMS["regex"], 1, stop=("-",))
    told = run(engine(), [one])[one.job_id]
    assert told.end is not None
    assert told.end.stop_reason == "-"
    assert re.fullmatch("[a-f]{2,4}", told.text)


def test_a_form_and_bans_that_leave_nothing_fail_that_job_alone(compiler: StructureCompiler) -> None:
    neighbour = request(compiler, FORMS["schema"], 1)
    alone = run(engine(), [neighbour])[neighbour.job_id]
    digits = tuple(byte_level().encode("0123456789", add_special_tokens=False).ids)
    stuck = request(compiler, Regex(pattern="[a-z]+"), 2, allowed_token_ids=digits)
    told = run(engine(), [neighbour, stuck])
    failure = told[stuck.job_id].failure
    assert failure is not None
    assert (failure.code, failure.message) == ("invalid", "no token is allowed to be output token 0")
    assert told[neighbour.job_id].token_ids == alone.token_ids


def test_a_log_that_does_not_fit_the_form_is_refused(compiler: StructureCompiler) -> None:
    bad = tuple(byte_level().encode("zz", add_special_tokens=False).ids)
    one = request(compiler, Regex(pattern="[a-c]+"), 1)._replace(logged_token_ids=bad)
    with pytest.raises(InvalidJob, match="logged output token 0 does not fit the structure"):
        engine().add(one)


BAD: dict[str, tuple[Structured, str]] = {
    "type": (JsonSchema(schema={"type": "strange"}), "this json_schema cannot be compiled: .*strange"),
    "keyword": (JsonSchema(schema={"not": {}}), 'cannot be compiled: Unimplemented keys: \\["not"\\]'),
    "lenient": (JsonSchema(schema={"x-guidance": {"lenient": True}, "not": {}}), "Unimplemented keys"),
    "impossible": (JsonSchema(schema={"type": "string", "enum": [1]}), "cannot be compiled"),
    "reference": (JsonSchema(schema={"$ref": "#/$defs/nowhere"}), "cannot be compiled"),
    "remote": (JsonSchema(schema={"$ref": "http://127.0.0.1:9/x"}), "cannot be compiled"),
    "regex": (Regex(pattern="(ab"), "this regex cannot be compiled: .*unclosed group"),
    "look-around": (Regex(pattern="(?=a)b"), "this regex cannot be compiled: .*look-around"),
    "grammar": (Grammar(grammar="nonsense ("), "this grammar cannot be compiled"),
    "unknown rule": (Grammar(grammar='start: "a" b'), 'this grammar cannot be compiled: .*unknown name: "b"'),
    "no start": (Grammar(grammar='other: "a"'), "this grammar cannot be compiled"),
}


@pytest.mark.parametrize(("form", "message"), BAD.values(), ids=BAD)
def test_a_bad_form_is_refused_and_the_next_good_one_works(
    compiler: StructureCompiler, form: Structured, message: str
) -> None:
    for _ in range(2):
        with pytest.raises(InvalidJob, match=f"(?s){message}"):
            compiler.compile(form)
    good = request(compiler, FORMS["choice"], 1)
    assert has_form(FORMS["choice"], run(engine(), [good])[good.job_id].text)


def test_a_form_that_takes_minutes_is_refused_in_time_and_remembered() -> None:
    impatient = StructureCompiler(byte_level(), vocab_size=VOCAB, endings=frozenset({EOS}), cpu_s=1.0)
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(impatient.compile, ENDLESS) for _ in range(4)]
        refusals = [future.exception() for future in futures]
    with pytest.raises(InvalidJob) as again:
        impatient.compile(ENDLESS)
    for refusal in (*refusals, again.value):
        assert isinstance(refusal, InvalidJob)
        assert "cannot be compiled: it is not done after 1 s of computing" in str(refusal)
    # Tried once, not five times.
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 2.5


def test_equal_forms_are_compiled_once(compiler: StructureCompiler) -> None:
    assert compiler.compile(FORMS["schema"]) is compiler.compile(JsonSchema(schema=dict(PERSON)))


def test_a_token_out_of_form_is_an_error(compiler: StructureCompiler) -> None:
    state = compiler.compile(Regex(pattern="[a-c]+")).begin()
    with pytest.raises(GrammarError, match="structured output"):
        state.accept(byte_level().encode("z").ids[0])
    with pytest.raises(GrammarError):
        state.allowed()
