"""Writes short children's stories with requests, questions and summaries."""

import random
from dataclasses import dataclass
from typing import Final

from training.grammar import Grammar, Telling

FILE: Final = "stories.grammar"
# Each plot is four rules of the grammar: the plot itself, PLOT_topic, PLOT_sum and PLOT_quiz.
PLOTS: Final = (
    "lost",
    "stuck",
    "afraid",
    "share",
    "mend",
    "picnic",
    "stray",
    "gift",
    "practice",
    "seed",
    "truth",
    "sick",
    "key",
    "race",
    "bedtime",
)


@dataclass(frozen=True)
class Story:
    """A story; questions about it are answered from the rows that its telling drew."""

    telling: Telling
    plot: str
    text: str

    def request(self) -> str:
        """Write a request for any story, or for one with this hero, this subject or both."""
        rng = self.telling.rng
        if rng.random() < 0.2:
            return self.telling.text("{any_request}")
        names = rng.choice((["who"], ["who"], [self.plot], ["who", self.plot]))
        subject = " and ".join(self.telling.text(f"{{{name}_topic}}") for name in names)
        return self.telling.text("{request}").replace("SUBJECT", subject)

    def summary(self) -> str:
        """Write a summary of one sentence, sometimes after one about the hero."""
        who = self.telling.text("{who_sum}") + " " if self.telling.rng.random() < 0.3 else ""
        return who + self.telling.text(f"{{{self.plot}_sum}}")

    def question(self) -> tuple[str, str]:
        """Write a question about the story, and its answer."""
        rule = "who" if self.telling.rng.random() < 0.25 else self.plot
        return self.telling.pair(f"{rule}_quiz")


def tell(grammar: Grammar, rng: random.Random) -> Story:
    """Write a story with a random plot."""
    plot = rng.choice(PLOTS)
    telling = Telling(grammar, rng)
    return Story(telling, plot, telling.text(f"{{opening}} {{{plot}}}"))
