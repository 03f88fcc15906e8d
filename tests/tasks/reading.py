"""What tests of readers ask: all usable examples, the reasons for the others, and that halves share nothing."""


def every(task):
    """All usable examples by id; the halves must share no group."""
    halves = {half: list(task.split(half)) for half in ("rank", "judge")}
    found = {e.id: e for half in halves.values() for e in half}
    assert len(found) == sum(map(len, halves.values()))
    return found


def one(task):
    (example,) = every(task).values()
    return example


def whys(task):
    return list(task.check().faults.values())


def halves_share_nothing(task, of):
    seen = [{of(e) for e in task.split(half)} for half in ("rank", "judge")]
    assert seen[0] and seen[1] and not seen[0] & seen[1]
