"""Lanes: what is kept, which stretch of time is shown, and what table and picture say of it."""

from pathlib import Path

from shardwise.observe.lanes_picture import LaneRecorder, LaneRows, LaneSpan, draw_picture, draw_text


def a_run(steps: int = 10, ahead: int = 1) -> LaneRecorder:
    """Steps of 10 s: 8 s of compute, half a second for something else, keys 3 s one step ahead, reading 1 s three steps
    ahead in two pieces."""
    lanes = LaneRecorder(global_batch=100)
    for step in range(1, steps + 1):
        start = 10.0 * step
        lanes.watch((step - 1) * 100, start - 30, start - 29.5)
        lanes.watch((step - 1) * 100, start - 29.8, start - 29.3)
        if ahead:
            lanes.record("keys", step, start - 8, start - 5)
        lanes.record("compute", step, start, start + 8, start - 1.5)
        lanes.record("waits", step, start + 1, start + 1.5)
        lanes.record("waits", step, start + 7, start + 7.25)
    return lanes


def test_a_window_shows_what_every_lane_did_in_one_stretch_of_time() -> None:
    spans = a_run().window(steps=3)
    first, *_, last = [span for span in spans if span.lane == "compute"]
    assert last.step - first.step == 2
    assert all(span.start_s < last.stop_s and span.stop_s > first.start_s for span in spans)
    assert [span.step for span in spans if span.lane == "keys"] == [first.step + 1, last.step, last.step + 1]
    assert {span.step for span in spans if span.lane == "read"} <= set(range(first.step + 3, last.step + 4))
    assert spans == sorted(spans, key=lambda span: span.start_s)


def test_the_steps_shown_are_of_middle_length() -> None:
    lanes = LaneRecorder()
    start = 0.0
    for step, length in enumerate([9.0, 1.0, 1.0, 2.0, 2.0, 8.0], 1):
        lanes.record("compute", step, start, start + length)
        start += length
    assert [span.step for span in lanes.window(steps=2)] == [4, 5], "of 2, 3, 4, 10 and 10 s"
    assert len(lanes.window(steps=50)) == 6
    assert LaneRecorder().window() == []


def test_a_ring_keeps_the_last_steps() -> None:
    steps = [span.step for span in a_run(1000).window(steps=1000) if span.lane == "compute"]
    assert steps == list(range(1000 - len(steps) + 1, 1001)) and len(steps) < 200


def test_the_table() -> None:
    lanes = a_run()
    lines = draw_text(lanes.figures(lanes.window(steps=3))).splitlines()
    head = ["step", "read ms", "keys ms", "compute ms", "keys ahead ms", "waited ms", "exposed ms"]
    assert [cell.strip() for cell in lines[0].split("  ") if cell] == head
    told = ["1000.00", "3000.00", "8000.00", "5000.00", "1500.00", "750.00"]
    assert [line.split()[1:] for line in lines[1:]] == [told] * 4, (
        "reads and keys of the first too, and the mean"
    )
    assert lines[-1].split()[0] == "mean"
    off = a_run(ahead=0)
    assert draw_text(off.figures(off.window())).splitlines()[1].split()[1:] == [
        "1000.00",
        "8000.00",
        "1500.00",
        "750.00",
    ]
    assert draw_text([]) == ""


def test_rows_of_tables_with_tiers() -> None:
    lanes = a_run()
    assert lanes.rows_text(lanes.window()) == ""
    for step in range(1, 11):
        lanes.record("disk", step, 10.0 * step - 5, 10.0 * step - 4)
        lanes.note_rows(step, LaneRows(90 + step, 10 - step, step / 1000))
    spans = lanes.window(steps=3)
    lines = draw_text(lanes.figures(spans)).splitlines()
    assert [cell.strip() for cell in lines[0].split("  ") if cell][-3:] == ["hits", "misses", "stall ms"]
    step = int(lines[1].split()[0])
    assert lines[1].split()[-3:] == [str(90 + step), str(10 - step), f"{step:.2f}"]
    assert lines[-1].split()[-3:] == [f"{91 + step:.2f}", f"{9 - step:.2f}", f"{step + 1:.2f}"]
    assert lanes.rows_text(spans) == (
        f"{(91 + step) / 100:.1%} of the rows in memory, {9 - step} missed and {step + 1:.2g} ms of stalls a step"
    )


def test_an_evaluation_is_no_waiting_and_stays_out_of_the_window() -> None:
    lanes, start = LaneRecorder(), 0.0
    for step in range(1, 13):
        aside = 30.0 if step in (5, 9) else 1.0
        lanes.record("keys", step, start - 2, start - 1)
        lanes.record("compute", step, start + aside + 0.5, start + aside + 5, start + aside)
        start += aside + 5
    assert {each.waited_ms for each in lanes.figures(lanes.spans)} == {500.0}
    steps = [span.step for span in lanes.window(6) if span.lane == "compute"]
    assert steps in ([1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]), "as many as there are between two of them"
    assert len([span for span in lanes.window(2) if span.lane == "compute"]) == 2


def test_the_picture(tmp_path: Path) -> None:
    path = tmp_path / "lanes.png"
    draw_picture({"rank 0": a_run().window(), "off": a_run(ahead=0).window(), "none": []}, path, "a run")
    assert path.read_bytes()[:4] == b"\x89PNG" and list(tmp_path.iterdir()) == [path]
    twins = [LaneSpan("read", step, 0.0, 1.0) for step in range(40)]
    draw_picture({"side by side": [*twins, LaneSpan("compute", 1, 0.0, 1.0)]}, path)
    draw_picture({}, path)
