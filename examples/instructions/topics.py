"""Requests of this example: families of subjects, what is asked of them, and which are held out."""

from __future__ import annotations

import random
from dataclasses import dataclass

HELD_OUT_EVERY = 5  # of each family, the last of so many subjects is held out

ASKS = (
    "Write a short text about {topic}.",
    "Tell me about {topic}.",
    "Explain {topic} in a few sentences.",
    "Describe {topic} to a friend.",
    "What would you say about {topic}?",
    "Write a note on {topic} for a school newspaper.",
    "Give a short answer on {topic}.",
    "A child asks about {topic}. What do you answer?",
)


@dataclass(frozen=True)
class Family:
    """Subjects of one sort, and the topics that each of them makes."""

    topics: tuple[str, ...]  # with {x} for the subject
    subjects: tuple[str, ...]

    @property
    def held_out(self) -> tuple[str, ...]:
        """The subjects that no training prompt has."""
        return self.subjects[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]

    @property
    def training(self) -> tuple[str, ...]:
        return tuple(one for one in self.subjects if one not in self.held_out)


def _subjects(text: str) -> tuple[str, ...]:
    return tuple(one.strip() for one in text.split(","))


FAMILIES = (
    Family(
        (
            "everyday life in {x}",
            "a rainy day in {x}",
            "how people earn a living in {x}",
            "what visitors notice first in {x}",
        ),
        _subjects(
            "a harbour town, a mountain village, a desert city, a small suburb, a mining town, "
            "an old capital, an island port, a university town, a border town, a lakeside resort, "
            "a fishing hamlet, a railway town, a market town, a spa town, a forest settlement"
        ),
    ),
    Family(
        (
            "how {x} find food",
            "why children like {x}",
            "what {x} do in winter",
            "the habits of {x}",
        ),
        _subjects(
            "foxes, owls, otters, bees, hedgehogs, dolphins, storks, beavers, frogs, squirrels, "
            "wolves, swallows, ants, seals, badgers"
        ),
    ),
    Family(
        (
            "how to make {x}",
            "the taste of {x}",
            "when people eat {x}",
            "a family dinner with {x}",
        ),
        _subjects(
            "rye bread, tomato soup, apple pie, fried rice, lentil stew, potato salad, dumplings, "
            "pancakes, roast chicken, goat cheese, noodle soup, omelettes, plum jam, flatbread, "
            "chocolate cake"
        ),
    ),
    Family(
        (
            "a day in the life of {x}",
            "what {x} needs to know",
            "the tools of {x}",
            "why somebody becomes {x}",
        ),
        _subjects(
            "a baker, a nurse, a carpenter, a bus driver, a lighthouse keeper, a gardener, "
            "a librarian, a plumber, a tailor, a shepherd, a surgeon, a journalist, a farmer, "
            "a firefighter, a clockmaker"
        ),
    ),
    Family(
        (
            "how {x} work",
            "the history of {x}",
            "how to choose {x}",
            "how to look after {x}",
        ),
        _subjects(
            "bicycles, umbrellas, pencils, mirrors, sewing machines, batteries, boots, kettles, "
            "violins, telescopes, lamps, backpacks, cameras, ladders, zippers"
        ),
    ),
    Family(
        (
            "what causes {x}",
            "where to see {x}",
            "what {x} mean for sailors",
            "the beauty of {x}",
        ),
        _subjects(
            "rainbows, tides, thunderstorms, sand dunes, glaciers, volcanoes, waterfalls, "
            "fogbanks, meteors, geysers, earthquakes, snowflakes, eclipses, caves, whirlpools"
        ),
    ),
    Family(
        (
            "how to begin with {x}",
            "the benefits of {x}",
            "the hardest part of {x}",
            "{x} with friends",
        ),
        _subjects(
            "swimming, chess, painting, hiking, knitting, cycling, singing, cooking, rowing, "
            "birdwatching, dancing, photography, camping, juggling, pottery"
        ),
    ),
    Family(
        (
            "what {x} are good for",
            "how {x} changed over time",
            "a visit to one of the {x}",
            "the people who care for {x}",
        ),
        _subjects(
            "public libraries, bridges, parks, museums, windmills, hospitals, post offices, "
            "playgrounds, theatres, botanical gardens, schools, railway stations, markets, canals, "
            "observatories"
        ),
    ),
)


def request(rng: random.Random, *, held_out: bool) -> str:
    """Return a request about a subject of training, or about one that is held out."""
    family = rng.choice(FAMILIES)
    subject = rng.choice(family.held_out if held_out else family.training)
    topic = rng.choice(family.topics).replace("{x}", subject)
    return rng.choice(ASKS).replace("{topic}", topic)
