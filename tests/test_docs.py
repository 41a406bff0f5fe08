"""What the documents say exists: settings, files, and the ten lines of the researcher's page."""

import re

from psearch_jax.config import Config, RewardConfig
from psearch_jax.config_files import flatten
from psearch_jax.questions.question import Question
from psearch_jax.rewards import composition
from psearch_jax.rollout.episode import Episode, Role, Turn

PAGES = ("docs/tpu_team.md", "docs/researcher.md", "docs/from_search_r1.md", "launch/README.md")
#: The left columns of from_search_r1.md, and what is no setting.
THEIRS = re.compile(r"^\| `[^|]*\|", re.MULTILINE)


def test_settings_and_files_that_pages_name_exist(root):
    known = set(flatten(Config()))
    sections = {key.split(".")[0] for key in known if "." in key}
    for page in PAGES:
        text = (root / page).read_text()
        if "from_search_r1" in page:
            text = THEIRS.sub("|", text)
        for name in re.findall(r"`(\w+(?:\.\w+)+)(?:[=`:])", text):
            if name.split(".")[0] in sections and not name.endswith((".py", ".md")):
                assert name in known, (page, name)
        for path in re.findall(r"\b((?:configs|launch|psearch_jax)/[\w/.-]+\.\w+)", text):
            assert (root / path).is_file(), (page, path)
        for target in re.findall(r"\]\(([\w/.]+)\)", text):
            assert (root / page).parent.joinpath(target).is_file(), (page, target)


def test_the_researchers_reward_is_a_reward(root):
    block = re.search(r"```python\n(.*?)```", (root / "docs/researcher.md").read_text(), re.DOTALL)
    assert block is not None and block[1].count("\n") <= 10
    names = {**vars(composition), "Role": Role}
    exec(block[1], names)
    question = Question(id="q", text="a", golden_answers=("b",))
    turn = Turn(kind="answer", start=1, stop=3, text="<answer>b</answer>", answer="b")
    roles = [Role.PROMPT, Role.POLICY, Role.POLICY]
    episode = Episode(
        question=question, group=0, member=0, ids=[1, 2, 3], roles=roles, turns=[turn]
    )
    group = composition.Group(
        config=RewardConfig(), protocol=Config().protocol, episodes=[episode], question=question
    )
    assert names["_brief"](group) == [{"em": 1.0, "brevity": -0.02}]
