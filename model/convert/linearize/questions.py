"""Questions that chats for training begin with and continue.

None is a question of `benchmarks/studies/chats/questions.json`, by which conversions are judged.
"""

from __future__ import annotations

import numpy as np

TOPICS = (
    *(
        "cats",
        "dogs",
        "the moon",
        "bread",
        "trains",
        "volcanoes",
        "rain",
        "a birthday party",
        "bees",
    ),
    *("healthy food", "friendship", "the ocean", "trees", "winter", "bicycles", "music", "money"),
    *(
        "computers",
        "the human body",
        "space",
        "sleep",
        "cooking",
        "a lost key",
        "mountains",
        "painting",
    ),
    *("school", "gardening", "dinosaurs", "football", "the sun", "electricity", "rivers", "time"),
    *("a small village", "lions", "colors", "holidays", "learning a language", "books", "coffee"),
    *("chess", "the desert", "elephants", "airplanes", "photography", "clouds", "ants", "castles"),
    *("running", "tea", "whales", "the wind", "clocks", "spiders", "swimming", "maps", "glass"),
    *("penguins", "dreams", "the heart", "earthquakes", "apples", "robots", "a kind teacher"),
    *("the seasons", "honesty", "camping", "the internet", "horses", "pirates", "islands", "snow"),
    *(
        "chocolate",
        "a brave mouse",
        "lighthouses",
        "recycling",
        "dancing",
        "frogs",
        "a night in a forest",
    ),
    *(
        "stars",
        "good habits",
        "cheese",
        "an old clockmaker",
        "ships",
        "birds",
        "patience",
        "medicine",
    ),
    *(
        "the Roman Empire",
        "Africa",
        "Japan",
        "the Middle Ages",
        "gravity",
        "light",
        "sound",
        "atoms",
    ),
    *(
        "vaccines",
        "climate",
        "a wise king",
        "a job interview",
        "exercise",
        "stress",
        "saving water",
    ),
    *(
        "a funny dragon",
        "brothers and sisters",
        "moving to a new city",
        "a picnic",
        "public speaking",
    ),
    *("Python programming", "fractions", "triangles", "prime numbers", "percentages", "spelling"),
)
QUESTIONS = (
    "Tell me about {}.",
    "Write a short story about {}.",
    "What is interesting about {}?",
    "Explain {} to a child.",
    "Give me three tips about {}.",
    "Write a short poem about {}.",
    "Why does {} matter?",
    "What should I know about {}?",
    "List five facts about {}.",
    "Write a short letter about {}.",
    "How would you describe {} in one sentence?",
    "What do people often get wrong about {}?",
    "I want to write an essay on {}. Where should I start?",
    "Compare {} with {}.",
    "What is the history of {}?",
    "Write a dialogue between two friends about {}.",
    "My daughter asks me about {}. What can I tell her?",
    "Can you give me a quiz question about {}?",
    "Summarize what is known about {} in two sentences.",
    "Invent a title for a book about {} and say what it is about.",
    "Do you like {}?",
    "What has {} to do with {}?",
)
PLAIN = (
    "Hello! How are you today?",
    "Who are you?",
    "What can you help me with?",
    "I feel sad today. Can you cheer me up?",
    "What is 12 plus 30?",
    "Write an email to my neighbor and ask him to water my plants.",
    "Translate 'good morning' into Spanish.",
    "Give me a synonym for 'happy'.",
    "Suggest a name for a small boat.",
    "I am bored. What can I do this afternoon?",
    "Correct this sentence: 'She go to school yesterday.'",
    "Write a to-do list for a busy Monday.",
    "How do I boil an egg?",
    "What is the difference between a lake and a sea?",
    "Tell me a joke.",
    "Tell me something surprising.",
)
FOLLOW_UPS = (
    "Can you give an example?",
    "Say that in one sentence.",
    "Why is that?",
    "Thank you! Tell me more.",
    "Can you explain it more simply?",
    "What else should I know?",
    "And what about {}?",
    "Now write it as a short poem.",
    "Make it shorter, please.",
    "What was my first question?",
    "That is interesting. How do you know?",
    "I do not understand the last part.",
    "Continue.",
    "Please give me a list of the main points.",
    "What would you recommend?",
    "Is that always true?",
    "Let us change the subject: tell me about {}.",
    "How does that compare with {}?",
    "What did you say first?",
    "Which of these is the most important?",
    "Great. Write one more.",
)


def question(rng: np.random.Generator) -> str:
    """The first message of a chat."""
    if rng.random() < 0.12:
        return _pick(rng, PLAIN)
    return _filled(rng, _pick(rng, QUESTIONS))


def follow_up(rng: np.random.Generator) -> str:
    """A later message."""
    if rng.random() < 0.2:
        return question(rng)
    return _filled(rng, _pick(rng, FOLLOW_UPS))


def _filled(rng: np.random.Generator, template: str) -> str:
    return template.format(*(_pick(rng, TOPICS) for _ in range(template.count("{}"))))


def _pick(rng: np.random.Generator, values: tuple[str, ...]) -> str:
    return values[int(rng.integers(len(values)))]
