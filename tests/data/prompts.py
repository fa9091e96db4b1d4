"""Twenty conversations of different lengths for comparisons of the real model; some are over 1,000 tokens long."""

from __future__ import annotations

_PASSAGES = (
    "A lighthouse keeper writes down the weather every hour. On calm days the page is almost empty, and on stormy days "
    "the ink runs. Ships rarely answer, but the keeper lights the lamp anyway, because the one night it is dark will be "
    "the night that somebody needs it.",
    "Bread needs four things: flour, water, salt and time. Bakers argue about the first three and forget the fourth. "
    "A slow dough, left in a cool room until morning, tastes of nuts and has a crust that sings when it leaves the oven.",
    "The river was moved twice in the last century, first for the mills and then for the railway. Old maps show it where "
    "the market stands now. When it rains for a week, the cellars there remember the first course and fill again.",
    "A queue is a promise: who comes first is served first. A priority queue is a different promise, and a fair queue a "
    "third one. Most disputes about service are disputes about which of the three was meant.",
    "Copper is soft, conducts well, and turns green outdoors. Roofs made of it last for two hundred years. The green "
    "layer protects the metal below, so that the roof which looks oldest is often the one that needs no repair.",
    "In 1854 a physician drew the deaths of an outbreak on a map of the streets. The points gathered around one pump. "
    "The handle of the pump was taken off, and the map became more famous than the cure.",
    "To fold a paper boat, begin with a rectangle. Fold it in half, fold the corners to the middle, turn up the edges, "
    "open it like a hat, and flatten it the other way. Pull the two points apart, and it floats until it is wet.",
)
_QUESTIONS = (
    "Name three primes.",
    "Write one sentence about the sea.",
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "List five animals that live in cold places.",
    "Tell me a very short story about a clock.",
    "What is 12 times 12?",
    "Give me a recipe for pancakes.",
    "Translate 'good morning' into Spanish.",
    "Who wrote Hamlet, and when?",
    "Summarize the text above in one sentence.",
    "Which of these facts surprised you the most?",
    "Make a title for the text above.",
    "List the materials that are named above.",
    "Write a question that the text above answers.",
    "Continue the text above with one more paragraph.",
    "What do the texts above have in common?",
    "Describe the second text for a child.",
    "Which text mentions a year? Quote it.",
    "Write a poem of four lines about the last text.",
)
# Passages before each question, repeated in order.
_NUM_PASSAGES = (0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 5, 7, 9, 14, 18, 22, 30)


def conversations() -> list[list[dict[str, str]]]:
    """Return the messages of each conversation."""
    return [
        [
            {
                "role": "user",
                "content": "\n\n".join(
                    [*(_PASSAGES[(index + offset) % len(_PASSAGES)] for offset in range(count)), question]
                ),
            }
        ]
        for index, (question, count) in enumerate(zip(_QUESTIONS, _NUM_PASSAGES, strict=True))
    ]
