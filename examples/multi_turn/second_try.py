"""A second try at the quickstart's task: who is wrong is asked again. Rows need an `answer` column. See recipes/tiny/multi_turn.yaml."""


async def rollout(prompt, generate, answer):
    """One answer, and where it is wrong the same question once more: its tokens are in no loss."""
    turn = await generate()
    if turn.text == answer:
        return {"last": turn.text, "tries": 1}
    turn = await generate([{"role": "user", "content": prompt}])
    return {"last": turn.text, "tries": 2}


def reward(prompts, completions, answer, last=None, tries=None, **columns):
    """1 for the right answer at once, 0.5 at the second try. A sample that a limit has cut has no last answer, and gets 0."""
    last, tries = last or [None] * len(answer), tries or [None] * len(answer)
    return [(1.0 if n == 1 else 0.5) if said == right else 0.0 for said, right, n in zip(last, answer, tries, strict=True)]
