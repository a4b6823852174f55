"""Short stories from templates, in four languages: the plain text of the corpus.

Choices are weighted so that the first option of each is clearly the likeliest. A model trained on them has a
clear favourite at every branch, hence few near ties between its top two logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple, TypeVar

from tiny import words
from tiny.words import Animal

T = TypeVar("T")


class Story(NamedTuple):
    """A story and who is in it, so that questions about it can be answered."""

    hero: str
    animal: Animal
    text: str
    summary: str


def pick(rng: Random, options: Sequence[T], ratio: float = 0.7) -> T:
    """Draw one option; each is `ratio` times as likely as the one before it."""
    return rng.choices(options, weights=[ratio**rank for rank in range(len(options))])[0]


def invent_name(rng: Random) -> str:
    """Make up a name that no list holds: a model can only learn to copy it."""
    syllables = ("ba", "do", "fi", "ka", "lu", "me", "no", "ri", "su", "ta", "ve", "zo")
    return "".join(rng.choices(syllables, k=rng.choice((2, 3)))).capitalize()


def hero_name(rng: Random) -> str:
    """Name an English hero: half of them from the list, half made up."""
    return rng.choice(words.NAMES) if rng.random() < 0.5 else invent_name(rng)


def english_story(rng: Random, hero: str, animal: Animal) -> Story:
    """Tell one of four plots about the hero."""
    plot = pick(rng, (_lost_thing, _storm, _race, _gift), 0.9)
    body, summary = plot(rng, hero, animal)
    kind = animal.name
    home = pick(rng, words.PLACES)
    opening = pick(
        rng,
        (
            f"Once upon a time, there was a little {kind} named {hero}. {hero} lived in the {animal.home}.",
            f"{hero} was a small {kind} with a big heart. Every day {hero} walked to the {home}.",
            f"In a quiet {home}, there lived a {animal.color} {kind}. The name of the {kind} was {hero}.",
        ),
        0.5,
    )
    ending = pick(rng, ("The end.", f"And {hero} was very {pick(rng, words.FEELINGS)}. The end."), 0.6)
    return Story(hero, animal, f"{opening} {body} {ending}", summary)


def _friend(rng: Random, hero: str, animal: Animal) -> tuple[str, str]:
    name = pick(rng, [name for name in words.NAMES if name != hero])
    if rng.random() < 0.3:
        name = invent_name(rng)
    kind = pick(rng, [other.name for other in words.ANIMALS if other != animal])
    return name, kind


def _lost_thing(rng: Random, hero: str, animal: Animal) -> tuple[str, str]:
    friend, kind = _friend(rng, hero, animal)
    thing = f"{pick(rng, words.COLORS)} {pick(rng, words.THINGS)}"
    first, second, third = rng.sample(words.SPOTS, 3)
    text = (
        f"{hero} had a {thing}. One {pick(rng, words.TIMES)}, the {thing} was gone. "
        f'"Where is my {thing}?" asked {hero}. {friend} the {kind} said, "I will help you." '
        f"They looked under the {first} and behind the {second}. "
        f"At last they found the {thing} near the {third}. "
        f"{hero} said thank you, and the two friends ate {pick(rng, words.FOODS)}."
    )
    return text, f"{hero} the {animal.name} lost a {thing}, and {friend} the {kind} helped to find it."


def _storm(rng: Random, hero: str, animal: Animal) -> tuple[str, str]:
    friend, kind = _friend(rng, hero, animal)
    weather = pick(rng, words.WEATHERS)
    spot = pick(rng, words.SPOTS)
    text = (
        f"One {pick(rng, words.TIMES)}, the {weather} came. {hero} was far from home and a little afraid. "
        f"Under the {spot}, {hero} met {friend} the {kind}. "
        f'"Come and sit with me," said {friend}. They sang a song and waited until the {weather} was over. '
        f"Then the sun came out, and they walked home together."
    )
    return (
        text,
        f"{hero} the {animal.name} was afraid of the {weather}, and {friend} the {kind} stayed as a friend.",
    )


def _race(rng: Random, hero: str, animal: Animal) -> tuple[str, str]:
    friend, kind = _friend(rng, hero, animal)
    place = pick(rng, words.PLACES)
    food = pick(rng, words.FOODS)
    text = (
        f'One {pick(rng, words.TIMES)}, {friend} the {kind} said, "Let us run to the {place}!" '
        f"{hero} ran fast, but {friend} fell down. {hero} stopped and helped {friend} to stand up. "
        f"They came to the {place} at the same time. "
        f'"We both won," said {hero}, and they shared some {food}.'
    )
    return text, f"{hero} the {animal.name} stopped in a race to help {friend} the {kind}, and both won."


def _gift(rng: Random, hero: str, animal: Animal) -> tuple[str, str]:
    friend, kind = _friend(rng, hero, animal)
    thing = f"{pick(rng, words.COLORS)} {pick(rng, words.THINGS)}"
    text = (
        f"It was the birthday of {friend} the {kind}. {hero} wanted to give a gift, but had no money. "
        f"So {hero} worked all day and made a {thing}. "
        f'"This is the best gift," said {friend}, and gave {hero} a big hug. '
        f"They danced and ate {pick(rng, words.FOODS)} until the moon was high."
    )
    return text, f"{hero} the {animal.name} made a {thing} for the birthday of {friend} the {kind}."


def turkish_story(rng: Random, hero: str, animal: Animal) -> str:
    """Tell a story in Turkish."""
    friend = pick(rng, [name for name in words.TURKISH_NAMES if name != hero])
    return (
        f"Bir varmış, bir yokmuş. Küçük bir {animal.turkish} varmış. Adı {hero} imiş. "
        f"{hero} {animal.turkish_home} yaşarmış ve her gün {animal.turkish_food} yermiş. "
        f"Bir gün yolda {friend} ile tanışmış. İki arkadaş birlikte oynamış, şarkı söylemiş ve çok gülmüş. "
        + pick(rng, ("Gökten üç elma düşmüş. 🍎🍎🍎", "Sonra evlerine dönmüşler. İyi geceler! 🌙"))
    )


def chinese_story(rng: Random, hero: str, animal: Animal) -> str:
    """Tell a story in Chinese."""
    friend = pick(rng, [name for name in words.CHINESE_NAMES if name != hero])
    return (
        f"从前有一只小{animal.chinese}，名字叫{hero}。{hero}住在{animal.chinese_home}，最爱吃{animal.chinese_food}。"
        f"有一天，{hero}遇见了{friend}。他们一起唱歌，一起玩耍，"
        + pick(rng, ("成了最好的朋友。🎉", "一直玩到月亮出来。🌙"))
    )


def arabic_story(rng: Random, hero: str, animal: Animal) -> str:
    """Tell a story in Arabic."""
    friend = pick(rng, [name for name in words.ARABIC_NAMES if name != hero])
    return (
        f"كان يا ما كان، كان هناك {animal.arabic} صغير اسمه {hero}. "
        f"كان {hero} يعيش في {animal.arabic_home} ويحب {animal.arabic_food}. "
        f"ذات يوم التقى {hero} صديقا اسمه {friend}، ولعبا معا حتى المساء. "
        + pick(rng, ("وعاشا في سعادة. ⭐", "ثم عاد كل منهما إلى البيت. 🌙"))
    )
