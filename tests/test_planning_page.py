"""The page on planning: its table is what the generator makes, and it speaks of every stage that a plan can have."""

import re

from benchmarks.llama_plan import BEGIN, END, GIB, PAGE, Asked, planned, table, with_table
from catalog import PLANNED_STAGES
from engine.memory.plan import readable_bytes

TINY = {
    "vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip


def stages(markdown: str) -> set[str]:
    return set(re.findall(r"^\| .*?\| \d+ \| \d+ \| (\w+) \|", markdown, flags=re.MULTILINE))


def test_the_generator_tells_each_stage_of_a_plan() -> None:
    asked = Asked(host_gibibytes=None, examples=8, batch_size=2, tokens=16)
    plan = planned(TINY, asked)
    made = table([(asked, plan)])
    assert stages(made) == set(plan["stages"])
    for figures in plan["stages"].values():
        assert readable_bytes(figures["host_bytes"]) in made
    weights = next(term for term in plan["terms"] if term["name"] == "weights")
    # embedding and head, and in each block four projections, three of the feed-forward and two norms; one norm at last,
    # and the frequencies of the rotations, twice
    counted = 2 * 100 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 32 + 2 * 4
    assert weights["size_bytes"] == 4 * counted
    assert Asked(host_gibibytes=3).budget.host_bytes == 3 * GIB


def test_the_page_holds_a_table_and_explains_its_stages() -> None:
    page = PAGE.read_text()
    shown = page.partition(BEGIN)[2].partition(END)[0]
    assert stages(shown) == {"collection", "decomposition", "capacity"}
    explained = set(re.findall(r"^\| `(\w+)` \|", page, flags=re.MULTILINE))
    assert explained == set(PLANNED_STAGES) - {"model"}
    # written anew, only the table changes
    again = with_table(page, "| new |\n")
    assert again.replace("| new |\n", shown) == page
