"""When the instructions of several ranks run: waits, hangs, and cores that are shared."""

import pytest

from partitioner.runtime.clock import Hang, Line, Meeting, Route, play


def test_the_clock_says_who_waits_for_whom() -> None:
    there, back = Route(0, 1, "v", 0, False), Route(1, 0, "v", 0, True)
    ask, give = Line("send", "RECV", 0.0, message=there), Line("send", "SEND", 1.0, message=there, sends=True)
    answer, take = Line("send", "SEND", 1.0, message=back, sends=True), Line("send", "RECV", 0.0, message=back)
    work = Line("compute", "FORWARD", 2.0)
    zero = [work, give, take, Line("compute", "BACKWARD", 2.0, awaits=[back])]
    one = [ask, Line("compute", "FORWARD", 2.0, awaits=[there]), answer]
    first, second = play([zero, one], overlap=True)
    assert (first.end, second.end) == (8.0, 6.0)  # 2 + 1 + 2 + 1 + 2, and 2 + 1 + 2 + 1
    with pytest.raises(Hang) as hang:
        play([[take, Line("compute", "BACKWARD", 2.0, awaits=[back]), give], one], overlap=True)
    assert hang.value.stuck == {0: (1, back), 1: (1, there)}


def test_what_stages_do_together_begins_when_the_last_has_come() -> None:
    both = (0, 1)
    loss, totals = Meeting(both, "LOSS", 0), Meeting(both, "EPILOGUE", 0)

    def stage(seconds: float) -> list[Line]:
        """The loss is awaited at the end, totals at once."""
        return [
            Line("compute", "FORWARD", seconds),
            Line("reduce", "LOSS", 0.5, meets=loss),
            Line("compute", "FORWARD", 1.0),
            Line("compute", "EPILOGUE", 0.25, awaits=[totals], meets=totals),
            Line("end", "FINISH", 0.0, awaits=[loss]),
        ]

    for overlap in (False, True):
        slow, quick = play([stage(6.0), stage(2.0)], overlap)
        assert slow.end == quick.end == 7.25
        assert ("compute", "EPILOGUE", 7.0, 7.25) in quick.events and ("reduce", "LOSS", 6.0, 6.5) in quick.events
        assert quick.issued[2] == 2.0  # it goes on meanwhile
    with pytest.raises(Hang) as hang:
        play([stage(6.0), [line for line in stage(2.0) if line.text != "EPILOGUE"]], overlap=True)
    assert hang.value.stuck == {0: (3, totals)}


def test_ranks_that_outnumber_the_cores_share_them() -> None:
    """Four ranks on two cores: priced for four at work, two at work are twice as quick, and one alone is no quicker than that."""
    works = [[Line("compute", "FORWARD", seconds)] for seconds in (4.0, 4.0, 8.0, 12.0)]
    # all four until 4; two of them have 4 and 8 left, at twice the speed until 6; the last has 4 left, at twice the speed until 8
    assert [times.end for times in play(works, overlap=False, share=0.5)] == [4.0, 4.0, 6.0, 8.0]
    assert [times.end for times in play(works, overlap=False)] == [4.0, 4.0, 8.0, 12.0]
    sent = Route(0, 1, "v", 0, False)
    first = [Line("compute", "FORWARD", 2.0), Line("send", "SEND", 1.0, message=sent, sends=True), Line("compute", "BACKWARD", 2.0)]
    second = [Line("send", "RECV", 0.0, message=sent), Line("compute", "FORWARD", 4.0, awaits=[sent])]
    # the second waits until 1 + 1; the first's backward and its forward share the core for 2, then it is alone with 2 left
    assert [times.end for times in play([first, second], overlap=False, share=0.5)] == [4.0, 5.0]
