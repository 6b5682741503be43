"""placeholder"""


def command() -> None: ...
