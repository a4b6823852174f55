"""The corpus of the tiny model: plain stories and chats, drawn from a seeded generator, never stored."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from tiny import stories, words
from tiny.stories import pick
from tiny.words import Animal


class Message(NamedTuple):
    """One turn of a chat, in the words of the chat template."""

    role: str
    content: str


class Document(NamedTuple):
    """One training text: either plain text or the turns of a chat."""

    text: str = ""
    messages: tuple[Message, ...] = ()


class Exchange(NamedTuple):
    """A question of the user and the answer to be learned."""

    question: str
    answer: str


def draw_document(rng: Random) -> Document:
    """Draw a document: a fifth are plain stories, the others chats of one to three exchanges."""
    if rng.random() < 0.2:
        return Document(text=_any_story(rng))
    messages = []
    if rng.random() < 0.35:
        messages.append(Message("system", pick(rng, words.SYSTEM_PROMPTS, 0.9)))
    for _ in range(rng.choices((1, 2, 3), weights=(7, 2, 1))[0]):
        exchange = draw_exchange(rng)
        messages += [Message("user", exchange.question), Message("assistant", exchange.answer)]
    return Document(messages=tuple(messages))


def draw_exchange(rng: Random) -> Exchange:
    """Draw one question with its answer, of any kind and language."""
    kinds = (_ask_story, _ask_about_story, _ask_fact, _ask_count, _ask_emoji, _ask_foreign, _ask_fixed)
    return rng.choices(kinds, weights=(5, 5, 3, 2, 2, 5, 2))[0](rng)


def _any_story(rng: Random) -> str:
    animal = rng.choice(words.ANIMALS)
    language = rng.choices(("en", "tr", "zh", "ar"), weights=(7, 1, 1, 1))[0]
    if language == "tr":
        return stories.turkish_story(rng, pick(rng, words.TURKISH_NAMES), animal)
    if language == "zh":
        return stories.chinese_story(rng, pick(rng, words.CHINESE_NAMES), animal)
    if language == "ar":
        return stories.arabic_story(rng, pick(rng, words.ARABIC_NAMES), animal)
    return stories.english_story(rng, stories.hero_name(rng), animal).text


def _ask_story(rng: Random) -> Exchange:
    name, animal = stories.hero_name(rng), rng.choice(words.ANIMALS)
    question = rng.choice(
        (
            f"Tell me a story about a {animal.name} named {name}.",
            f"Please write a short story. The hero is {name}, a {animal.name}.",
            f"I want a story about {name} the {animal.name}!",
            f"{name} is a {animal.name}. Tell me what happened one day.",
        )
    )
    return Exchange(question, stories.english_story(rng, name, animal).text)


def _ask_about_story(rng: Random) -> Exchange:
    """Ask about the last of one to three stories, which makes the long prompts."""
    num_stories = rng.choices((1, 2, 3), weights=(5, 3, 2))[0]
    heroes = {stories.hero_name(rng): rng.choice(words.ANIMALS) for _ in range(num_stories)}
    told = [stories.english_story(rng, hero, animal) for hero, animal in heroes.items()]
    text = "\n\n".join(story.text for story in told)
    last = told[-1]
    question, answer = rng.choice(
        (
            ("Sum up the last story in one sentence.", last.summary),
            (
                f"What kind of animal was {last.hero}?",
                f"{last.hero} was a {last.animal.name}. I know this because the story says so.",
            ),
            (
                "Who is the hero of the last story?",
                f"The hero is {last.hero}, a little {last.animal.name}. {last.summary}",
            ),
        )
    )
    return Exchange(f"Read this:\n\n{text}\n\n{question}", answer)


def _ask_fact(rng: Random) -> Exchange:
    animal = rng.choice(words.ANIMALS)
    name, home, food, sound = animal.name, animal.home, animal.food, animal.sound
    facts = {
        f"Where does the {name} live?": (
            f"The {name} lives in the {home}. There it can sleep, play and look for {food}."
        ),
        f"What does the {name} eat?": f"The {name} likes to eat {food}. It looks for food near the {home}.",
        f"What does the {name} say?": f'The {name} says "{sound}, {sound}!" when it is happy. {animal.emoji}',
        f"What color is the {name}?": f"The {name} is {animal.color}. You can see it in the {home}.",
        f"Tell me about the {name}.": _describe(animal),
    }
    return Exchange(*rng.choice(list(facts.items())))


def _describe(animal: Animal) -> str:
    return (
        f"The {animal.name} is a {animal.color} animal. It lives in the {animal.home} and eats "
        f'{animal.food}. It says "{animal.sound}". {animal.emoji}'
    )


def _ask_count(rng: Random) -> Exchange:
    first = rng.randint(1, 9)
    last = first + rng.randint(3, 10)
    return Exchange(f"Count from {first} to {last}.", ", ".join(map(str, range(first, last + 1))) + ". Done!")


def _ask_emoji(rng: Random) -> Exchange:
    animal = rng.choice(words.ANIMALS)
    if rng.random() < 0.5:
        return Exchange(f"What is {animal.emoji}?", f"{animal.emoji} is a {animal.name}. {_describe(animal)}")
    return Exchange(
        f"Draw one {animal.name} with emoji.",
        f"🌳🌳{animal.emoji}🌳🌳 Here is one {animal.name} in the trees. {animal.emoji}{animal.emoji}",
    )


def _ask_foreign(rng: Random) -> Exchange:
    return rng.choice((_ask_turkish, _ask_chinese, _ask_arabic))(rng)


def _ask_turkish(rng: Random) -> Exchange:
    name, animal = rng.choice(words.TURKISH_NAMES), rng.choice(words.ANIMALS)
    kind = animal.turkish
    fact = f"{kind.capitalize()} {animal.turkish_home} yaşar ve {animal.turkish_food} yer. {animal.emoji}"
    return rng.choice(
        (
            Exchange(
                f"Bana bir masal anlat. Adı {name}, bir {kind}.", stories.turkish_story(rng, name, animal)
            ),
            Exchange(f"Bir {kind} nerede yaşar?", fact),
            Exchange(f"Bir {kind} ne yer?", fact),
        )
    )


def _ask_chinese(rng: Random) -> Exchange:
    name, animal = rng.choice(words.CHINESE_NAMES), rng.choice(words.ANIMALS)
    kind = animal.chinese
    fact = f"{kind}住在{animal.chinese_home}，喜欢吃{animal.chinese_food}。{animal.emoji}"
    return rng.choice(
        (
            Exchange(f"请讲一个故事，主角是{kind}{name}。", stories.chinese_story(rng, name, animal)),
            Exchange(f"{kind}住在哪里？", fact),
            Exchange(f"{kind}吃什么？", fact),
        )
    )


def _ask_arabic(rng: Random) -> Exchange:
    name, animal = rng.choice(words.ARABIC_NAMES), rng.choice(words.ANIMALS)
    kind = animal.arabic
    fact = f"يعيش ال{kind} في {animal.arabic_home} ويأكل {animal.arabic_food}. {animal.emoji}"
    return rng.choice(
        (
            Exchange(f"احك لي قصة عن {kind} اسمه {name}.", stories.arabic_story(rng, name, animal)),
            Exchange(f"أين يعيش ال{kind}؟", fact),
            Exchange(f"ماذا يأكل ال{kind}؟", fact),
        )
    )


def _ask_fixed(rng: Random) -> Exchange:
    return Exchange(*rng.choice(words.QUESTIONS + words.GREETINGS))
