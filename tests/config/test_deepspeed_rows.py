"""The notation of the table of DeepSpeed's keys."""

from shardwise.config.deepspeed_rows import DeepSpeedKey, block, does, idle, of, old, refused


def test_rows_say_the_fate_of_a_key() -> None:
    assert does("a", "int", 1, "zero.a") == DeepSpeedKey("a", "int", 1, "does", "zero.a")
    assert idle("a", "int", 1, "why").fate == "idle" and refused("a", "int", 1, "b").fate == "refused"
    assert old("a", "int", "b").stands_for == "b" and old("a", "int", "b").default is None


def test_a_block_puts_its_path_in_front_of_its_keys_and_of_what_they_stand_for() -> None:
    inner = block(does("inner", "block", None, ""), does("a", "int", 1, ""), old("b", "int", "a"))
    rows = block(does("outer", "block", None, ""), inner, does("c", "int", 1, ""))
    assert [row.path for row in rows] == ["outer", "outer.inner", "outer.inner.a", "outer.inner.b", "outer.c"]
    assert [row.stands_for for row in rows] == ["", "", "", "outer.inner.a", ""]


def test_rows_of_some_types_alone() -> None:
    first, second = of("Adam Lamb", does("lr", "num", 1, ""), does("eps", "num", 1, ""))
    assert (first.path, second.path) == ("lr", "eps") and first.of == second.of == ("Adam", "Lamb")
