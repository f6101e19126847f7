"""Generation above a scripted model: stopping, characters, reuse of the cache, statistics, conversations."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from fake_model import BOS, CHATML, EOS, IM_END, IM_START, FakeModel, FakeTokenizer, answers, says

from tinyllm.conversation import Conversation
from tinyllm.errors import ChatTemplateError, ContextFullError, InvalidParameterError
from tinyllm.generate import Generation, chat, generate
from tinyllm.prefix import common_prefix, keep_sampled
from tinyllm.sampler import SamplingParams
from tinyllm.stopping import StopFilter

GREEDY = SamplingParams(temperature=0)


def run(script, prompt="go", **options) -> Generation:
    generation = generate(FakeModel(script), prompt, params=GREEDY, **options)
    generation.read()
    return generation


def test_steps_are_the_tokens_one_by_one_and_the_last_says_why():
    steps = list(generate(FakeModel(says("Hi!")), "go", params=GREEDY))
    assert [step.token for step in steps] == [*b"Hi!", EOS]
    assert [step.text for step in steps] == ["H", "i", "!", ""]
    assert [step.finish_reason for step in steps] == [None, None, None, "stop"]


@pytest.mark.parametrize(
    ("options", "text", "reason"),
    [
        pytest.param({}, "abc", "stop", id="end token"),
        pytest.param({"max_tokens": 2}, "ab", "length", id="max_tokens"),
        pytest.param({"max_tokens": 3}, "abc", "length", id="max_tokens just before the end token"),
        pytest.param({"max_tokens": 4}, "abc", "stop", id="end token is the last allowed one"),
        pytest.param({"max_tokens": 0}, "", "length", id="no tokens wanted"),
        pytest.param({"max_tokens": -1}, "abc", "stop", id="negative means no limit"),
        pytest.param({"stop": "b"}, "a", "stop", id="one stop string"),
        pytest.param({"stop": ["x", "bc"]}, "a", "stop", id="stop string across tokens"),
        pytest.param({"stop": ["c"], "max_tokens": 3}, "ab", "stop", id="stop string in the last allowed token"),
        pytest.param({"ignore_eos": True, "max_tokens": 6}, "abc", "length", id="end tokens ignored"),
    ],
)
def test_end_of_generation(options, text, reason):
    generation = run(says("abc"), **options)
    assert (generation.text, generation.finish_reason) == (text, reason)


def test_ignored_end_tokens_are_steps_like_others():
    generation = run(says("ab"), ignore_eos=True, max_tokens=4)
    assert generation.tokens == [*b"ab", EOS, EOS]


def test_a_control_token_can_be_a_stop_string():
    generation = run(says("a", IM_START, "b"), stop="<|im_start|>")
    assert (generation.text, generation.finish_reason) == ("a", "stop")


@pytest.mark.parametrize(
    ("pushed", "stops", "out"),
    [
        (["hello"], [], ["hello"]),
        (["a", "S", "T", "x"], ["STOP"], ["a", "", "", "STx"]),
        (["aST", "OP"], ["STOP"], ["a", ""]),
        (["aaab"], ["aab"], ["a"]),
        (["aa", "ab"], ["aab"], ["", "a"]),
        (["xyz"], ["yz", "xyz!"], ["x"]),
        (["END one"], ["one", "END"], [""]),
        (["\n", "\nUser:"], ["\n\nUser:"], ["", ""]),
    ],
    ids=str,
)
def test_stop_filter_holds_back_only_what_may_become_a_stop_string(pushed, stops, out):
    stop_filter = StopFilter(stops)
    assert [stop_filter.push(text)[0] for text in pushed] == out


@pytest.mark.parametrize("split", range(1, 9))
def test_stop_string_is_found_however_tokens_cut_it(split):
    text = "say <END> no"
    pieces = [text[at : at + split].encode() for at in range(0, len(text), split)]
    model = FakeModel(says(*range(260, 260 + len(pieces))), pieces=pieces)
    assert generate(model, "go", params=GREEDY, stop=["<END>"]).read() == "say "


def test_text_that_might_have_become_a_stop_string_comes_out_at_the_end():
    assert run(says("a<EN"), stop="<END>").text == "a<EN"


def test_characters_come_whole_and_an_unfinished_one_at_the_end():
    steps = list(generate(FakeModel(says("é😀", b"\xf0\x9f")), "go", params=GREEDY))
    assert [step.text for step in steps] == ["", "é", "", "", "", "😀", "", "", "\ufffd"]


def test_characters_split_over_tokens_with_a_stop_string_behind():
    assert run(says("😀 END"), stop=" END").text == "😀"


def test_logprobs_are_those_of_the_raw_logits():
    step = next(generate(FakeModel(says("a")), "go", temperature=5.0, top_k=1, logprobs=3))
    logits = np.zeros(260)
    logits[ord("a")] = 10
    expected = logits - np.log(np.exp(logits).sum())
    assert step.logprob == pytest.approx(expected[ord("a")], abs=1e-5)
    assert step.top_logprobs[0][0] == ord("a")
    assert [lp for _, lp in step.top_logprobs] == pytest.approx(
        [expected[ord("a")], expected[0], expected[0]], abs=1e-5
    )


def test_statistics_count_tokens():
    statistics = run(says("abc"), prompt="four").statistics
    assert (statistics.prompt_tokens, statistics.reused_tokens, statistics.computed_tokens) == (4, 0, 4)
    assert statistics.generated == 4
    assert statistics.prompt_s > 0 and statistics.decode_tok_s > 0


def test_time_of_the_consumer_is_not_in_the_statistics():
    import time

    generation = generate(FakeModel(says("abcdef")), "go", params=GREEDY)
    for _ in generation:
        time.sleep(0.02)
    assert generation.statistics.decode_s < 0.06


def test_the_seed_used_is_known():
    assert generate(FakeModel(says("a")), "go", seed=7).seed == 7
    assert isinstance(generate(FakeModel(says("a")), "go").seed, int)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        pytest.param(None, {}, "a prompt is a text or a list of token ids", id="no prompt"),
        pytest.param([1.5], {}, "token ids, which are whole numbers", id="fractional id"),
        pytest.param(["go"], {}, "token ids, which are whole numbers", id="list of texts"),
        pytest.param("go", {"max_tokens": 2.5}, "max_tokens must be a whole number, not 2.5", id="fractional limit"),
        pytest.param("go", {"max_tokens": "3"}, "max_tokens must be a whole number, not '3'", id="limit as text"),
        pytest.param("go", {"logprobs": "x"}, "logprobs must be a whole number", id="logprobs"),
        pytest.param("go", {"stop": 5}, "stop must be a text or a list of texts, not 5", id="stop number"),
        pytest.param("go", {"stop": [5]}, "stop must be a text or a list of texts", id="stop numbers"),
        pytest.param("go", {"stop": b"x"}, "stop must be a text or a list of texts", id="stop bytes"),
    ],
)
def test_arguments_that_cannot_be_are_named(prompt, options, message):
    with pytest.raises(InvalidParameterError, match=message):
        generate(FakeModel(says("a")), prompt, **options)


@pytest.mark.parametrize(
    "messages", ["Hi", {"role": "user", "content": "Hi"}, ["Hi"], []], ids=["text", "message", "texts", "none"]
)
def test_what_is_no_conversation_is_said(messages):
    with pytest.raises(InvalidParameterError, match="messages"):
        chat(FakeModel(says("a")), messages)


def test_the_conversation_cannot_be_a_template_variable():
    with pytest.raises(InvalidParameterError, match="messages cannot be a variable"):
        chat(FakeModel(says("a")), [{"role": "user", "content": "Hi"}], template_args={"messages": 1})


def test_numbers_of_numpy_and_no_stops_are_fine():
    assert run(says("abc"), prompt=np.array([1, 2]), max_tokens=np.int64(2), stop=None).text == "ab"


class TestPrompts:
    def test_ids_are_taken_as_they_are(self):
        model = FakeModel(says("a"), add_bos=True)
        generate(model, [1, 2, 3], params=GREEDY).read()
        assert model.evaluated[:3] == [1, 2, 3]

    def test_text_gets_bos_and_special_tokens(self):
        model = FakeModel(says("a"), add_bos=True)
        generate(model, "x<|im_end|>", params=GREEDY).read()
        assert model.evaluated[:3] == [BOS, ord("x"), IM_END]

    @pytest.mark.parametrize("empty", ["", []])
    def test_empty_prompt_starts_from_bos(self, empty):
        model = FakeModel(says("a"), add_bos=True)
        assert generate(model, empty, params=GREEDY).read() == "a"
        assert model.evaluated[0] == BOS

    @pytest.mark.parametrize("empty", ["", []])
    def test_empty_prompt_without_bos_is_an_error(self, empty):
        with pytest.raises(InvalidParameterError, match="empty"):
            generate(FakeModel(says("a")), empty)

    @pytest.mark.parametrize("bad", [[-1], [260], [0, 10**9]])
    def test_ids_outside_the_vocabulary_are_an_error(self, bad):
        with pytest.raises(InvalidParameterError, match="between 0 and 259"):
            generate(FakeModel(says("a")), bad)

    def test_empty_stop_string_is_an_error(self):
        with pytest.raises(InvalidParameterError, match="stop string"):
            generate(FakeModel(says("a")), "go", stop=[""])

    @pytest.mark.parametrize("n", [511, 512, 513, 1024, 1025])
    def test_prompts_around_the_batch_size(self, n):
        model = FakeModel(says("ok"))
        assert generate(model, [65] * n, params=GREEDY).read() == "ok"
        assert model.evaluated == [65] * n + [*b"ok"]

    def test_prompt_that_does_not_fit_is_refused_with_both_numbers(self):
        with pytest.raises(ContextFullError, match=r"11 tokens.* 10\b"):
            generate(FakeModel(says("a"), n_ctx=10), [65] * 11)

    @pytest.mark.parametrize(("n_prompt", "n_generated"), [(10, 1), (9, 2), (4, 7)])
    def test_context_is_used_to_the_last_place(self, n_prompt, n_generated):
        model = FakeModel(says(then=65), n_ctx=10)
        generation = generate(model, [65] * n_prompt, params=GREEDY)
        generation.read()
        assert (len(generation.tokens), generation.finish_reason) == (n_generated, "length")
        assert len(model.evaluated) == 10


class TestReuse:
    def test_only_new_tokens_are_computed(self):
        model = FakeModel(says("yz"))
        sequence = model.new_sequence()
        generate(model, "abc", params=GREEDY, sequence=sequence).read()
        assert sequence.tokens == [*b"abcyz"]  # the end token is sampled, not computed
        model.evaluated.clear()
        model.script = says("!")
        second = generate(model, "abcyz more", params=GREEDY, sequence=sequence)
        second.read()
        assert model.evaluated == [*b" more!"]
        assert second.statistics.reused_tokens == 5

    def test_full_hit_computes_the_last_token(self):
        model = FakeModel(says("a"))
        sequence = model.new_sequence()
        for _ in range(2):
            generation = generate(model, "same", params=GREEDY, sequence=sequence)
            assert generation.read() == "a"
        assert generation.statistics.reused_tokens == 3

    def test_a_shorter_prompt_cuts_the_sequence(self):
        model = FakeModel(says("zz"))
        sequence = model.new_sequence()
        generate(model, "a long prompt", params=GREEDY, sequence=sequence).read()
        generate(model, "a lo", params=GREEDY, sequence=sequence, max_tokens=1).read()
        assert sequence.tokens == [*b"a lo"]

    def test_own_sequence_is_given_back_even_when_left_early(self):
        model = FakeModel(says("abc"))
        generation = generate(model, "go", params=GREEDY)
        next(generation)
        generation.close()
        assert model.sequences[0].released

    def test_callers_sequence_is_not_given_back(self):
        model = FakeModel(says("abc"))
        sequence = model.new_sequence()
        generate(model, "go", params=GREEDY, sequence=sequence).read()
        assert not sequence.released

    @pytest.mark.parametrize(
        ("held", "ids", "kept"),
        [
            pytest.param([97, 260], [97, 98, 99, 100], [97, 260, 100], id="reply in larger tokens"),
            pytest.param([97, 98, 99], [97, 260, 100], [97, 98, 99, 100], id="reply in smaller tokens"),
            pytest.param([97, 261], [97, 98, 99, 100], [97, 98, 99, 100], id="token goes beyond the text"),
            pytest.param([97, 98], [97, 99], [97, 99], id="other text"),
            pytest.param([260, 259, 260], [98, 99, 259, 98, 99, 97], [260, 259, 260, 97], id="two replies"),
            pytest.param([97, 259], [97, *b"<|im_end|>"], [97, *b"<|im_end|>"], id="typed control text stays text"),
            pytest.param([], [97], [97], id="nothing held"),
        ],
    )
    def test_replies_stay_in_the_tokens_that_the_model_wrote(self, held, ids, kept):
        assert keep_sampled(FakeTokenizer([b"bc", b"bcx"]), held, ids) == kept

    def test_common_prefix(self):
        assert [common_prefix(a, b) for a, b in [([], [1]), ([1, 2], [1, 3]), ([1], [1, 2]), ([1, 2], [1, 2])]] == [
            0,
            1,
            1,
            2,
        ]


class TestInterruption:
    def test_should_stop_ends_with_what_came(self):
        said = []
        generation = generate(FakeModel(says("abcdef")), "go", params=GREEDY, should_stop=lambda: len(said) >= 3)
        for step in generation:
            said.append(step.text)
        assert (generation.text, generation.finish_reason) == ("abc", None)

    def test_held_text_can_be_taken(self):
        taken = 0
        generation = generate(
            FakeModel(says("ab<E😀")), "go", params=GREEDY, stop="<END>", should_stop=lambda: taken >= 5
        )
        for _ in generation:
            taken += 1
        assert generation.text == "ab"
        assert generation.take_held() == "<E\ufffd"
        assert generation.text == "ab<E\ufffd"
        assert generation.take_held() == ""

    def test_keyboard_interrupt_passes_and_gives_the_sequence_back(self):
        def script(tokens):
            if len(tokens) == 4:
                raise KeyboardInterrupt
            return 97

        model = FakeModel(script)
        generation = generate(model, "go", params=GREEDY)
        with pytest.raises(KeyboardInterrupt):
            generation.read()
        assert generation.text == "aa"
        assert model.sequences[0].released


class TestConversation:
    def ask(self, conversation: Conversation, text: str, **options) -> Generation:
        with conversation.ask(text, params=GREEDY, **options) as generation:
            generation.read()
        return generation

    def test_turns_reach_the_model_in_its_template(self):
        model = FakeModel(answers("One.", "Two."))
        conversation = Conversation(model, system="Be brief.")
        assert [self.ask(conversation, text).text for text in ("1?", "2?")] == ["One.", "Two."]
        assert conversation.messages == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "1?"},
            {"role": "assistant", "content": "One."},
            {"role": "user", "content": "2?"},
            {"role": "assistant", "content": "Two."},
        ]
        tokens = conversation.encode(conversation.messages[:-1])
        assert conversation._sequence.tokens == [*tokens, *b"Two."]

    def test_second_turn_computes_only_what_is_new(self):
        model = FakeModel(answers("One.", "Two."))
        conversation = Conversation(model)
        self.ask(conversation, "first question")
        model.evaluated.clear()
        generation = self.ask(conversation, "2?")
        new = [IM_END, *b"\n", IM_START, *b"user\n2?", IM_END, *b"\n", IM_START, *b"assistant\n"]
        assert model.evaluated == [*new, *b"Two."]
        assert generation.statistics.computed_tokens == len(new)

    def test_a_reply_in_other_tokens_is_reused_too(self):
        model = FakeModel(answers([260, 261], "Two."), pieces=[b"On", b"e."])
        conversation = Conversation(model)
        self.ask(conversation, "1?")
        model.evaluated.clear()
        self.ask(conversation, "2?")
        assert model.evaluated[0] == IM_END

    def test_partial_answer_is_kept(self):
        model = FakeModel(answers("A long answer."))
        conversation = Conversation(model)
        with conversation.ask("1?", params=GREEDY) as generation:
            for _ in range(6):
                next(generation)
        assert conversation.messages[-1] == {"role": "assistant", "content": "A long"}

    def test_unanswered_question_is_taken_back(self):
        conversation = Conversation(FakeModel(answers("One.")))
        with conversation.ask("1?", params=GREEDY):
            pass
        assert conversation.messages == []

    def test_undo_and_clear(self):
        conversation = Conversation(FakeModel(answers("One.", "Two.")), system="S")
        self.ask(conversation, "1?")
        self.ask(conversation, "2?")
        assert conversation.undo()["content"] == "2?"
        assert [m["content"] for m in conversation.messages] == ["S", "1?", "One."]
        conversation.clear()
        assert [m["content"] for m in conversation.messages] == ["S"]
        assert conversation.undo() is None
        assert conversation.n_tokens == 0

    def test_system_message_can_change(self):
        conversation = Conversation(FakeModel(answers("One.")))
        self.ask(conversation, "1?")
        conversation.system = "S"
        assert conversation.messages[0] == {"role": "system", "content": "S"}
        conversation.system = None
        assert [m["role"] for m in conversation.messages] == ["user", "assistant"]

    def test_full_context_is_refused_with_the_numbers(self):
        conversation = Conversation(FakeModel(answers("x" * 30), n_ctx=100))
        self.ask(conversation, "1?")
        with pytest.raises(ContextFullError, match=r"\d+ tokens, the context holds 100"), conversation.ask("y" * 40):
            pass
        assert [m["content"] for m in conversation.messages] == ["1?", "x" * 30]

    def test_context_shift_forgets_the_oldest_turns_and_answers_as_if_they_had_never_been(self):
        model = FakeModel(lambda tokens: ord("a") + sum(tokens) % 26 if len(tokens) % 9 else IM_END, n_ctx=150)
        conversation = Conversation(model, system="S", context_shift=True)
        for n in range(12):
            self.ask(conversation, f"question {n}", max_tokens=30)
            assert conversation.n_tokens <= 150
        assert conversation.forgotten > 0
        assert conversation.messages[0]["content"] == "S"
        assert conversation.messages[1]["role"] == "user"
        fresh = Conversation(model, system="S")
        fresh.messages = conversation.messages[:-2]
        assert self.ask(fresh, "question 11", max_tokens=30).text == conversation.messages[-1]["content"]

    def test_context_shift_in_the_middle_of_an_answer(self):
        wanted = "The quick brown fox jumps over the lazy dog, and so on and on and on."
        model = FakeModel(answers("x" * 40), n_ctx=150)
        conversation = Conversation(model, context_shift=True)
        self.ask(conversation, "1?")
        model.script = answers(wanted)
        generation = self.ask(conversation, "2?")
        assert (generation.text, generation.finish_reason) == (wanted, "stop")
        assert [m["content"] for m in conversation.messages] == ["2?", wanted]

    def test_context_shift_that_cannot_help_is_refused_and_forgets_nothing(self):
        conversation = Conversation(FakeModel(answers("x" * 20), n_ctx=100), context_shift=True)
        self.ask(conversation, "1?")
        with pytest.raises(ContextFullError), conversation.ask("y" * 200):
            pass
        assert [m["content"] for m in conversation.messages] == ["1?", "x" * 20]

    def test_an_answer_longer_than_the_context_ends_by_length(self):
        conversation = Conversation(FakeModel(answers("x" * 500), n_ctx=100), context_shift=True)
        assert self.ask(conversation, "1?").finish_reason == "length"

    def test_chat_without_template_is_an_error(self):
        with pytest.raises(ChatTemplateError, match="no chat template"):
            chat(FakeModel(says("a"), template=None), [{"role": "user", "content": "hi"}])

    def test_text_of_users_never_becomes_a_control_token(self):
        model = FakeModel(answers("ok"))
        chat(model, [{"role": "user", "content": "<|im_end|>"}], params=GREEDY).read()
        assert model.evaluated.count(IM_END) == 1

    def test_template_arguments_reach_the_template(self):
        model = FakeModel(says("ok"), template=CHATML + "{{ mood }}")
        chat(model, [{"role": "user", "content": "hi"}], template_args={"mood": "glad"}, params=GREEDY).read()
        assert bytes(model.evaluated[-6:-2]) == b"glad"


def test_parameters_can_be_given_by_name_or_together():
    params = dataclasses.replace(GREEDY, seed=3)
    assert generate(FakeModel(says("a")), "go", params=params).seed == 3
    assert generate(FakeModel(says("a")), "go", params=params, seed=4).seed == 4
    with pytest.raises(TypeError):
        generate(FakeModel(says("a")), "go", temprature=1)
